"""How much a model's parts matter: scores of heads, hidden features, layers and experts; the least are removed.

A part's contribution is what it adds to the inputs x of the linear layer that ends its branch, `out` of attention or
`down` of a perceptron, whose columns W_j belong to one feature each:

- `magnitude`: ‖W_j‖, without data.
- `activation`: ‖x_j‖ · ‖W_j‖ over calibration data (Sun et al., ICLR 2024, "Wanda", section 3, of whole columns).
- `taylor`: the mean over batches of |Σ x_j · ∂loss/∂x_j|, the first-order change of the loss when the feature is
  multiplied by zero (Michel et al., NeurIPS 2019, "Are Sixteen Heads Really Better than One?", equation 2).

A part of several features, such as a head, has the norm of the first two, and of the third the sum before |·|.

Shapes: G KV heads, M hidden width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.compress.prune import keep_layers, take_experts
from penstock.config.compress import Criterion, LayerCriterion
from penstock.config.layer import Layer
from penstock.config.stack import Stack
from penstock.errors import ConfigError
from penstock.models.anatomy import evaluating
from penstock.models.expert_linear import ExpertLinear
from penstock.models.experts import MixtureOfExperts
from penstock.models.model import Model

Loss = Callable[[nn.Module, Any], Tensor]
"""The mean loss of the model on a batch, 0-d."""


@dataclass(slots=True)
class BlockScores:
    """Scores of the parts of one block; a higher score matters more."""

    heads: Tensor
    """(G,): each KV head with the queries that share it."""
    hidden: Tensor
    """(M,), or for a mixture (E, M)."""
    cross: Tensor | None = None
    """The same as `heads`, for cross attention."""
    shared: Tensor | None = None
    """(S · M,): hidden features of the experts that every token visits."""


def part_scores(
    model: Model, run: str, batches: Sequence[Any], loss: Loss, criterion: Criterion
) -> list[BlockScores]:
    """Scores of heads and hidden features of each block of a run. `batches` may be empty for `magnitude`."""
    gauges: list[dict[str, _Gauge]] = []
    for block, layer in zip(getattr(model, run).blocks, model.graph.run(run).stack.layers, strict=True):
        size = layer.queries_per_key * layer.value_width
        gauges.append({"heads": _Gauge(block.attention.out, size), "hidden": _Gauge(block.mlp.down, 1)})
        if block.cross is not None:
            gauges[-1]["cross"] = _Gauge(block.cross.out, size)
        if getattr(block.mlp, "shared", None) is not None:
            gauges[-1]["shared"] = _Gauge(block.mlp.shared.down, 1)
    every = [gauge for parts in gauges for gauge in parts.values()]
    if criterion != "magnitude":
        with ExitStack() as hooks, evaluating(model):
            for gauge in every:
                hooks.enter_context(gauge.watch(gradients=criterion == "taylor"))
            for batch in batches:
                with torch.set_grad_enabled(criterion == "taylor"):
                    value = loss(model, batch)
                if criterion == "taylor":
                    value.backward()  # type: ignore[no-untyped-call]
                    model.zero_grad(set_to_none=True)
                for gauge in every:
                    gauge.close_batch()
    return [
        BlockScores(**{part: gauge.score(criterion) for part, gauge in parts.items()}) for parts in gauges
    ]


@dataclass(eq=False)
class _Gauge:
    """Sums over the inputs of one linear layer, for groups of `size` consecutive features."""

    linear: nn.Linear | ExpertLinear
    size: int
    squares: Tensor | None = None
    """Σ x² of each feature; (features,) or (E, features)."""
    batch: Tensor | None = None
    """Σ x · ∂loss/∂x in this batch."""
    sums: list[Tensor] = field(default_factory=list)
    """By batch, the absolute sums of `batch` over each group."""

    def watch(self, *, gradients: bool) -> RemovableHandle:
        """Add each pass of the layer to the sums, until the handle is removed."""

        def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            x, experts = inputs[0], inputs[2] if isinstance(module, ExpertLinear) else None
            if gradients:
                x.register_hook(lambda grad: self._add("batch", x.detach() * grad, experts))
            else:
                self._add("squares", x.detach().square(), experts)

        return self.linear.register_forward_pre_hook(look)

    def _add(self, name: str, values: Tensor, experts: Tensor | None) -> None:
        values = values.flatten(0, -2).double()
        if experts is None:
            added = values.sum(0)
        else:
            added = values.new_zeros(len(self.linear.weight), values.shape[1]).index_add_(0, experts, values)
        before = getattr(self, name)
        setattr(self, name, added if before is None else before + added)

    def close_batch(self) -> None:
        """Store the sums of a batch."""
        if self.batch is not None:
            self.sums.append(self._grouped(self.batch).sum(-1).abs())
            self.batch = None

    def score(self, criterion: Criterion) -> Tensor:
        """The scores of the groups, on the host."""
        weight = self.linear.weight.detach().double()
        columns = weight.norm(dim=-2)  # of each input feature
        if criterion == "taylor":
            scores = torch.stack(self.sums).mean(0)
        else:
            squares: Any = self.squares if criterion == "activation" else 1.0
            scores = self._grouped(columns.square() * squares).sum(-1).sqrt()
        return scores.cpu()

    def _grouped(self, values: Tensor) -> Tensor:
        return values.reshape(*values.shape[:-1], -1, self.size)


# -- layers


def layers_to_keep(
    model: Model, run: str, count: int, batches: Sequence[Any], loss: Loss, criterion: LayerCriterion
) -> list[int]:
    """The numbers of the `count` blocks of a run that matter most.

    - `loss`: repeatedly remove the block without which the loss on the batches is lowest.
    - `activation`: keep blocks whose outputs are least like their inputs: 1 − their mean cosine (Men et al., 2024,
      "ShortGPT", equation 1).
    - `even`: blocks at equal distances, including the first and the last (Sanh et al., 2019, "DistilBERT", section 3).
    """
    depth = model.graph.run(run).stack.depth
    if criterion == "even":
        return sorted({round(i * (depth - 1) / max(1, count - 1)) for i in range(count)})
    if criterion == "activation":
        influence = _influences(model, run, batches, loss)
        return sorted(sorted(range(depth), key=lambda i: -influence[i])[:count])
    blocks = list(range(depth))
    while len(blocks) > count:
        tried = {
            i: mean_loss(keep_layers(model, run, [j for j in blocks if j != i]), batches, loss)
            for i in blocks
        }
        blocks.remove(min(blocks, key=tried.__getitem__))
    return blocks


def mean_loss(model: Model, batches: Sequence[Any], loss: Loss) -> float:
    """Mean over batches of the model's loss, in evaluation mode."""
    with torch.no_grad(), evaluating(model):
        return sum(float(loss(model, batch)) for batch in batches) / len(batches)


def _influences(model: Model, run: str, batches: Sequence[Any], loss: Loss) -> list[float]:
    blocks = getattr(model, run).blocks
    alike = torch.zeros(len(blocks), dtype=torch.float64)

    def look(number: int) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            alike[number] += F.cosine_similarity(inputs[0], output, dim=-1).mean().double().cpu()

        return hook

    with ExitStack() as hooks:
        for number, block in enumerate(blocks):
            hooks.enter_context(block.register_forward_hook(look(number)))
        mean_loss(model, batches, loss)
    return [1.0 - value / len(batches) for value in alike.tolist()]


# -- experts


def expert_scores(
    model: Model, run: str, batches: Sequence[Any], loss: Loss, *, by_error: bool
) -> list[Tensor | None]:
    """Scores (E,) of the experts of each mixture of a run: the number of tokens that visit each, or with `by_error` the
    relative change of the mixture's outputs without it, when its tokens go to other experts.

    Raises ConfigError for the error of experts in groups."""
    scores: list[Tensor | None] = []
    stack = model.graph.run(run).stack
    if by_error and stack.router_groups > 1:
        raise ConfigError(
            f"The experts of {run} are in {stack.router_groups} groups, none of which can lose an expert; use "
            "prune.experts_by load."
        )
    for number, block in enumerate(getattr(model, run).blocks):
        if not isinstance(block.mlp, MixtureOfExperts):
            scores.append(None)
            continue
        mixture: MixtureOfExperts = block.mlp
        sums = torch.zeros(mixture.experts, dtype=torch.float64)
        sizes = replace(stack, experts=stack.experts - 1)
        layer = sizes.layers[number]
        if by_error:
            handle = mixture.register_forward_hook(partial(_add_errors, sums, stack, sizes, layer))
        else:
            handle = mixture.down.register_forward_pre_hook(partial(_add_visits, sums))
        with handle:
            mean_loss(model, batches, loss)
        scores.append(sums / len(batches))
    return scores


def _add_visits(visits: Tensor, _: nn.Module, inputs: tuple[Any, ...]) -> None:
    visits += torch.bincount(inputs[2].cpu(), minlength=len(visits))


def _add_errors(
    errors: Tensor, stack: Stack, sizes: Stack, layer: Layer, mixture: nn.Module, inputs: tuple[Any, ...],
    output: Tensor,
) -> None:  # fmt: skip
    """Add the relative change of a mixture's outputs without each of its experts, computed for one expert at a time."""
    for expert in range(stack.experts):
        state = dict(mixture.state_dict())
        take_experts(state, "", stack, [e for e in range(stack.experts) if e != expert])
        with torch.random.fork_rng(devices=[output.device] if output.is_cuda else []):
            smaller = MixtureOfExperts(sizes, layer, device=output.device, dtype=output.dtype)
        smaller.load_state_dict(state)
        errors[expert] += ((smaller.eval()(*inputs) - output).norm() / output.norm()).double().cpu()
