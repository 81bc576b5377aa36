"""The base of our models of all families: how they are allocated, and what can be chosen after they are made."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.config.plan import AttentionBackend, TokenOrder
from penstock.errors import ConfigError
from penstock.kernels.attention import BACKENDS


class Undrawn(TorchFunctionMode):
    """Inside, torch's modules leave their weights as allocated: `init_weights` draws them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


class Switched(nn.Module):
    """A model whose attention kernel and order of tokens can be chosen; parameters and results stay as they are."""

    sequence_first = False

    @property
    def token_order(self) -> TokenOrder:
        """Order of the token tensor inside the blocks."""
        return "batch_second" if self.sequence_first else "batch_first"

    def set_token_order(self, token_order: TokenOrder) -> None:
        """Choose the order of the token tensor inside the blocks."""
        if token_order not in ("batch_first", "batch_second"):
            raise ConfigError(f"There is no token order {token_order!r}; choose batch_first or batch_second.")
        for module in self.modules():
            if hasattr(module, "sequence_first"):
                setattr(module, "sequence_first", token_order == "batch_second")  # noqa: B010 (for mypy)

    def set_attention(self, backend: AttentionBackend) -> None:
        """Choose the kernel of attention in every block."""
        if backend not in BACKENDS:
            raise ConfigError(
                f"There is no attention backend {backend!r}; choose one of {', '.join(BACKENDS)}."
            )
        for module in self.modules():
            if hasattr(module, "backend"):
                setattr(module, "backend", backend)  # noqa: B010 (for mypy)
