"""An exponential moving average of weights, stored on the weights' devices and updated without the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.config.convert import Probability, require
from penstock.errors import CheckpointError
from penstock.optim import tensors
from penstock.optim.one_pass import OnePassAdamW, SideTensors

_CHUNK = 1 << 20


class EMA:
    """shadow ← decay · shadow + (1 − decay) · weight, after every optimizer step (Polyak and Juditsky, 1992).

    Averages are always stored in fp32: in bf16 a step of 1 − 0.9999 would round away. All floating-point parameters are
    averaged; buffers remain the model's own. If `update` follows `every_step`, an `OnePassAdamW` updates the averages
    within its own pass, and `update` does the rest. With master weights, pass them by name as `weights`, and the
    function that rounds them into the model as `publish`.
    """

    def __init__(
        self, model: nn.Module, decay: float, optimizer: Optimizer | None = None, *,
        weights: Mapping[str, Tensor] | None = None, publish: Callable[[], None] | None = None,
        every_step: bool = False,
    ) -> None:  # fmt: skip
        require("recipe.ema_decay", decay, Probability)
        self.decay = decay
        named = dict(model.named_parameters() if weights is None else weights)
        self._parameters: dict[str, Tensor] = {n: p for n, p in named.items() if p.is_floating_point()}
        self._publish = publish
        self._scratch: Tensor | None = None
        named = {name: parameter.detach() for name, parameter in self._parameters.items()}
        self._shadows = {name: weight.to(torch.float32, copy=True) for name, weight in named.items()}
        self.begun = False
        """Whether there was an update; before it the averages are the initial weights, even if others were loaded."""
        self._folded: SideTensors | None = None
        if every_step and isinstance(optimizer, OnePassAdamW):
            shadows = {parameter: self._shadows[name] for name, parameter in self._parameters.items()}
            self._folded = optimizer.averages = SideTensors(shadows, set(), part=1.0 - decay)

    @torch.no_grad()
    def update(self) -> None:
        """Move every average towards the current weights."""
        self.begun = True
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for name, parameter in self._parameters.items():
            if self._folded is not None and parameter in self._folded.written:
                continue
            average, weight = tensors.local(self._shadows[name]), tensors.local(parameter.detach())
            if weight.dtype == average.dtype and weight.device == average.device:
                averages.append(average)
                weights.append(weight)
            else:
                self._lerp(average, weight)
        if averages:
            torch._foreach_lerp_(averages, weights, 1.0 - self.decay)
        if self._folded is not None:
            self._folded.written.clear()

    def _lerp(self, shadow: Tensor, value: Tensor) -> None:
        """Move an average towards a weight of another dtype or on another device."""
        if not (shadow.device.type == "cpu" and shadow.is_contiguous() and value.is_contiguous()):
            shadow.lerp_(value.to(shadow), 1.0 - self.decay)
            return
        # A cast of all at once would allocate an fp32 copy in each step: 31 ms for 22 million elements, against 4.
        if self._scratch is None:
            self._scratch = torch.empty(_CHUNK, dtype=shadow.dtype)
        for into, piece in zip(torch.split(shadow.view(-1), _CHUNK), torch.split(value.view(-1), _CHUNK)):
            cast = self._scratch[: piece.numel()]
            cast.copy_(piece)
            into.lerp_(cast, 1.0 - self.decay)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by the names of `model.named_parameters()`, without integer parameters."""
        return dict(self._shadows)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore averages. Raises CheckpointError, and changes nothing, when names or shapes do not match."""
        missing, unknown = self._shadows.keys() - state_dict.keys(), state_dict.keys() - self._shadows.keys()
        shapes = [n for n, s in self._shadows.items() if n in state_dict and state_dict[n].shape != s.shape]
        problems = [
            f"{kind}: {', '.join(sorted(names))}"
            for kind, names in (("missing", missing), ("unknown", unknown), ("of another shape", shapes))
            if names
        ]
        if problems:
            raise CheckpointError(
                f"The stored averages belong to another model ({'; '.join(problems)}); load them into the model "
                "that they were made with."
            )
        self.begun = True
        for name, shadow in self._shadows.items():
            shadow.copy_(tensors.alike(shadow, state_dict[name]))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within this context, the model's parameters hold the averages; afterwards their own values again. Values are
        copied in place, so that views and compiled code stay valid."""
        own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        try:
            self._fill(self._shadows)
            yield
        finally:
            self._fill(own)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])
        if self._publish is not None:
            self._publish()
