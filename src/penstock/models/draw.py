"""Random initialisation of a model's weights, as its graph says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.config.graph import Graph, Init, TokenInput, WordHead
from penstock.models.block import Branch, ZeroLinear
from penstock.models.expert_linear import ExpertLinear
from penstock.models.experts import MixtureOfExperts
from penstock.models.heads import AttentionPool, UnitVectors
from penstock.models.sublayers import Attention, CrossAttention, HeadShift, Sinks


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's CPU generator starts from `seed`; afterwards its state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Undrawn(TorchFunctionMode):
    """Inside, torch's modules do not initialise their weights, because `draw_weights` does."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@torch.no_grad()
def draw_weights(model: nn.Module, graph: Graph) -> None:
    """Initialise all weights as `graph.init` says: biases to 0, norms to 1, convolutions by He et al."""
    tables = {one.table: getattr(model, one.table) for one in graph.inputs if isinstance(one, TokenInput)}
    for head in graph.heads_of(WordHead):
        if head.tied:
            linear = getattr(model, head.name)
            linear.weight = tables[head.tied].weight
            linear.tied = True
    shared = {id(table.weight) for table in tables.values()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | ExpertLinear):
            if id(module.weight) not in shared:
                _draw(model, graph, name, module)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            tokens = id(module.weight) in shared
            width = module.embedding_dim if tokens else graph.width
            nn.init.normal_(module.weight, std=_deviation(graph.init, tokens, width))
        elif isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.BatchNorm2d | Sinks | HeadShift):
            module.reset_parameters()
        elif isinstance(module, Branch | MixtureOfExperts | AttentionPool):
            module.init_weights()
        if isinstance(module, UnitVectors):
            module.init_weights()
    for name in ("class_token", "distil_token", "registers"):
        token: nn.Parameter | None = getattr(model, name, None)
        if token is not None:
            nn.init.normal_(token, std=0.02)


def _deviation(init: Init, of_tokens: bool, width: int) -> float:
    """The standard deviation of a table's rows."""
    narrow = width**-0.5
    if init == "fan_in":
        return 1.0 if of_tokens else narrow
    return narrow if init == "xavier" and of_tokens else 0.02


def _draw(model: nn.Module, graph: Graph, name: str, module: nn.Linear | ExpertLinear) -> None:
    init, inside = graph.init, name.rpartition(".")[2]
    if isinstance(module, ZeroLinear):
        nn.init.zeros_(module.weight)
        return
    if init == "xavier":
        bound = (6.0 / (module.in_features + module.out_features)) ** 0.5
        nn.init.uniform_(module.weight, -bound, bound)
        return
    deviation = module.in_features**-0.5 if init == "fan_in" else 0.02
    if init == "scaled" and inside in ("out", "down"):
        deviation /= (2 * sum(run.stack.depth for run in graph.runs)) ** 0.5
    nn.init.normal_(module.weight, std=deviation)
    if init == "fan_in" and inside in ("q", "qkv"):
        # T5 does not scale scores, and initialises queries with a smaller deviation instead.
        attention = model.get_submodule(name.rpartition(".")[0])
        assert isinstance(attention, Attention | CrossAttention)
        rows, features = module.weight, attention.head_width
        if isinstance(attention, Attention):
            groups = rows.view(-1, attention.shared + 2, features, rows.shape[1])
            rows = groups[:, : attention.shared]
        rows.mul_(features**-0.5)
