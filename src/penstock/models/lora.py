"""Low-rank adapters for frozen linears (Hu et al., ICLR 2022, "LoRA"), from peft.

A linear with weight W returns W·x + scale · B·(A·x) once adapted, where A is random and B is zero at first, and only A
and B are trained. In a state dict W is stored as `NAME.base_layer.weight`, A at `NAME.lora_A.default.weight` (rank, in)
and B at `NAME.lora_B.default.weight` (out, rank).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.config.convert import nearest
from penstock.config.graph import ClassHead
from penstock.config.run import Lora
from penstock.errors import ConfigError, EnvironmentProblem
from penstock.models.anatomy import anatomy_of, evaluating
from penstock.models.frozen import freeze_linears, with_plain_weights
from penstock.models.roles import Attention, Embedding, Head, Linear, Perceptron, Pooler, Role, walk
from penstock.models.wrap import exchanged

BASE, FIRST, SECOND = "base_layer", "lora_A.default", "lora_B.default"
"""Names, in an adapted linear, of the frozen linear, of A and of B."""
_BASE, _A, _B = f".{BASE}.", f".{FIRST}.weight", f".{SECOND}.weight"


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Add an adapter to the linears whose roles `lora.parts` lists, and freeze all other parameters except those that
    `lora.trained_parts` matches. Heads for classes, and the pooler before them, are trained too. A is drawn from
    torch's global generator.

    Raises:
        ConfigError: the model's parts are not known, it has none of these roles, or lacks a part of `trained_parts`.
        EnvironmentProblem: peft is missing.
    """
    try:
        import peft
    except ImportError as error:
        raise EnvironmentProblem(
            f"recipe.lora needs the package peft, which cannot be imported ({error}). Install it with: "
            f"pip install 'penstock[lora]', or set recipe.lora.rank to 0."
        ) from None
    names = adapted(model, lora)
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.rank * scale_of(lora), lora_dropout=lora.dropout, target_modules=names,
        fan_in_fan_out=any(linear.transposed for linear in _linears(model)),
    )  # fmt: skip
    learning = [role.name for role in _of_classes(model)]
    parameters = [name for name, _ in model.named_parameters()]
    for pattern in lora.trained_parts:
        if not any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for name in parameters):
            raise ConfigError(
                f"recipe.lora.trained_parts names {pattern!r}, but the model has no such part."
                f"{nearest(pattern, parameters)}"
            )
    peft.inject_adapter_in_model(config, model)
    for module in filter(is_adapted, model.modules()):
        # Otherwise half inputs are cast to fp32 and by autocast back to half, and so are their gradients.
        cast(Any, module).cast_input_dtype_enabled = False
    for name, parameter in model.named_parameters():
        for pattern in (*learning, *lora.trained_parts):
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*"):
                parameter.requires_grad_(True)


def store_base(model: nn.Module, lora: Lora) -> None:
    """Quantise the frozen linears as `lora.base` says, in place. Raises ConfigError if none can be quantised."""
    if lora.base != "plain":
        freeze_linears(model, lora.base, BASE)


def gives_classes(model: nn.Module) -> bool:
    """Whether the model has a head for classes, not words. A head is for words if it has an output for each row of the
    table of tokens.
    """
    return bool(_of_classes(model))


def _of_classes(model: nn.Module) -> list[Role]:
    """The heads for classes, and the poolers."""
    every = list(walk(anatomy_of(model).stacks))
    heads = [role for role in every if isinstance(role, Head)]
    graph = getattr(model, "graph", None)
    if graph is not None:  # one of ours: it may have as many classes as words
        classes = {name for head in graph.heads_of(ClassHead) for name in head.linears}
        heads = [role for role in heads if role.name in classes]
    else:
        tables = (role for role in every if isinstance(role, Embedding) and role.kind == "token")
        words = {_rows(model, role) for role in tables}
        heads = [role for role in heads if _rows(model, role) not in words]
    return [*heads, *(role for role in every if isinstance(role, Pooler))] if heads else []


def _rows(model: nn.Module, role: Role) -> int:
    weight = model.get_submodule(role.name).weight
    assert isinstance(weight, Tensor)
    return len(weight)


def adapted(model: nn.Module, lora: Lora) -> list[str]:
    """Qualified names of the linears that get an adapter. Raises ConfigError if there are none."""
    kinds = {"attention": (Attention,), "perceptron": (Perceptron,), "all": (Attention, Perceptron)}[
        lora.parts
    ]
    parts = [role for role in walk(anatomy_of(model).stacks) if isinstance(role, kinds)]
    names = [role.name for part in parts for role in walk(part) if isinstance(role, Linear)]
    if not names:
        raise ConfigError(
            f"recipe.lora.parts is {lora.parts}, but {type(model).__name__} has no such parts that are known; enrol it "
            f"with penstock.models.anatomy.enrol, or set recipe.lora.rank to 0."
        )
    return names


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a linear with an adapter."""
    return hasattr(module, "lora_A")


def _linears(model: nn.Module) -> Iterator[Linear]:
    return (role for role in walk(anatomy_of(model).stacks) if isinstance(role, Linear))


def scale_of(lora: Lora) -> float:
    """The factor of the adapters' outputs."""
    return (lora.alpha or 2 * lora.rank) / lora.rank


def without_adapters(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, the model has only its frozen linears, under their own names, so that weights can be loaded into them."""
    names = (name for name, module in model.named_modules() if is_adapted(module))
    return exchanged(model, {name: model.get_submodule(f"{name}.{BASE}") for name in names})


def base_outputs(model: nn.Module, *inputs: Any) -> Any:
    """The outputs of the model without its adapters, in evaluation mode and without gradients."""
    with evaluating(model), without_adapters(model), torch.no_grad():
        return model(*inputs)


def merged(state: Mapping[str, Tensor], lora: Lora, model: nn.Module) -> dict[str, Tensor]:
    """A state dict with each adapter added to its weight, in fp32, under the names of the model without adapters.
    `model` is the model of the state, with adapters or without; it shows which weights are stored as (in, out).
    Quantised weights become their values.
    """
    if not lora.rank:
        return dict(state)
    transposed = {linear.name for linear in _linears(model) if linear.transposed}
    if lora.base != "plain":
        dtype = next(tensor.dtype for name, tensor in state.items() if name.endswith(_B))
        frozen = {name.removesuffix("_scale") for name in state if name.endswith(".weight_scale")}
        turned = {f"{name}{end}" for name in transposed for end in (".weight", f"{_BASE}weight")} & frozen
        state = with_plain_weights(state, dtype)
        state = {name: tensor.T if name in turned else tensor for name, tensor in state.items()}
    weights: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith((_A, _B)):
            continue
        plain = name.replace(_BASE, ".")
        outer, _, kind = name.rpartition(_BASE)
        if outer and kind == "weight":
            added = state[outer + _B].float() @ state[outer + _A].float() * scale_of(lora)
            added = added.T if outer in transposed else added
            tensor = (tensor.float() + added.to(tensor.device)).to(tensor.dtype)
        weights[plain] = tensor
    return weights
