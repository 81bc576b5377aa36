"""A mixture of experts in place of a block's perceptron (Shazeer et al., ICLR 2017).

Shapes: T tokens, D width, E experts, k experts per token, V visits of tokens to experts (T·k where none is dropped), M
hidden width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.config.layer import Layer
from penstock.config.stack import Stack
from penstock.errors import ConfigError
from penstock.kernels.bias_activation import activate
from penstock.kernels.dropout import Dropout
from penstock.kernels.padding import put_rows
from penstock.models.balance_loss import add_gradient
from penstock.models.expert_linear import ExpertLinear
from penstock.models.router import Router, recomputing, repeated
from penstock.models.sublayers import MLP
from penstock.models.visits import loads_of, merged, permuted, places_of, spread

Facts = list[Tensor | None]
"""Values per token, (T,) each: shares, routes, places."""
Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes experts on rows (V, D) sorted by expert, given the rows' experts (V,) and the number of rows per expert."""
_TOKENS = 1 << 40
"""An upper bound of the number of visits in a micro-batch."""
UNIT = 2.0**-50
"""Biases of sigmoid routers are stored as integer multiples of it, which casts to half precision do not round."""


def mixtures_of(model: nn.Module) -> list[MixtureOfExperts]:
    """A model's mixtures, in order, without the mixtures of other pipeline stages."""
    return [m for m in model.modules() if isinstance(m, MixtureOfExperts) and m.up.weight is not None]


@torch.no_grad()
def balance(mixtures: Sequence[MixtureOfExperts], add_up: Callable[[list[Tensor]], None]) -> None:
    """Finish a step: sum the loads of its micro-batches over ranks with `add_up`, which works in place, store them, and
    adjust the biases of sigmoid routers accordingly."""
    add_up([mixture.loads for mixture in mixtures])
    for mixture in mixtures:
        loads = mixture.loads
        if mixture.correction is not None:
            # Compare each load with the mean in integers: E · load with the sum of loads.
            few = torch.sign(loads.sum() - len(loads) * loads)
            mixture.correction += (few * round(mixture.bias_rate / UNIT)).to(torch.int64)
        mixture.last.copy_(loads)
        loads.zero_()


class Exchange(Protocol):
    """Exchange of tokens with other ranks in a mixture: see `penstock.parallel.experts`."""

    splits_tokens: bool
    """Whether ranks with the same tokens each route a part of them; their counts are then summed."""

    def enter(self, x: Tensor, shares: Tensor | None, *facts: Tensor | None) -> tuple[Tensor, Facts]:
        """The tokens (T, D) of x (·, ·, D) that this rank routes, with their shares and other values (T,)."""

    def visit(
        self, rows: Tensor, experts: Tensor, loads: Tensor, compute: Compute, meanwhile: Callable[[], None]
    ) -> Tensor:
        """Run `compute` for rows (V, D), sorted by expert, on the ranks that hold their experts, and return the
        results. `experts` (V,) are the rows' experts, `loads` (E,) the visits per expert. `meanwhile` may be called
        once during the transfer."""

    def leave(self, out: Tensor) -> Tensor:
        """Convert results of tokens that this rank routed, (T, D), to the layout that the rest of the block expects."""


class MixtureOfExperts(nn.Module):
    """Several experts, each a perceptron; a token visits those that the router chooses. The result is the weighted sum
    of the outputs of a token's experts, plus the outputs of the shared experts, which every token visits. Visits are
    sorted by expert, so that one grouped product computes all experts.
    """

    correction: Tensor | None
    """(E,) int64: the bias added to each expert's sigmoid when experts are chosen, in multiples of `UNIT`."""
    loads: Tensor
    """(E,) int64: visits so far in the current step."""
    last: Tensor
    """(E,) int64: visits in the previous step, summed over all ranks."""
    visits: Tensor
    """(L, E) int64: visits in this process during training, by the label of the sample (one row without labels),
    including visits that a capacity drops."""
    expert_of: Tensor | None
    """(L,) int64: the expert of each label, if experts are given with the samples and labels share them."""

    def __init__(self, sizes: Stack, layer: Layer, **where: Any) -> None:
        super().__init__()
        assert layer.mixture is not None
        mixture, expert = layer.mixture, layer.perceptron
        self.kind, self.normalises = mixture.router, mixture.router_normalised
        self.experts, self.chosen = mixture.experts, mixture.experts_per_token
        self.groups, self.taken = mixture.router_groups, mixture.groups_per_token
        self.group_best, self.scale = mixture.group_best, mixture.router_scale
        self.balance = mixture.balance if mixture.balances else 0.0
        self.z_loss, self.bias_rate = mixture.z_loss, mixture.bias_rate
        self.masked = mixture.expert_dropout
        self.capacity, self.sample_capacity = mixture.capacity, mixture.sample_capacity
        self.activation = expert.activation
        self.router = Router(sizes.width, mixture, **where) if mixture.learns_routes else None
        rows = expert.width * (2 if expert.gated else 1)
        self.up = ExpertLinear(self.experts, sizes.width, rows, bias=layer.bias, **where)
        self.dropout = Dropout(sizes.hidden_dropout) if sizes.hidden_dropout else None
        self.down = ExpertLinear(self.experts, expert.width, sizes.width, bias=layer.bias, **where)
        self.shared: MLP | None = None
        if mixture.shared_experts:
            # Several shared experts are computed as one with the sum of their widths.
            self.shared = MLP(sizes, layer, hidden=expert.width * mixture.shared_experts, **where)
        self.stepped = False
        """Whether `balance` is called after each step."""
        self.exchange: Exchange | None = None
        """Exchange with other ranks; None if this rank has all tokens and experts."""
        self.neighbours: Callable[[Tensor], Tensor] | None = None
        """Gathers values (V,) from the ranks that have other tokens of the same samples, if there are any."""
        none = torch.zeros(self.experts, dtype=torch.int64, device=where.get("device"))
        self.register_buffer("correction", none.clone() if mixture.router == "sigmoid" else None)
        self.register_buffer("loads", none, persistent=False)
        self.register_buffer("last", none.clone())
        self.labels, self._table = mixture.labels, mixture.expert_of
        visits = none.new_zeros(max(1, self.labels), self.experts)
        self.register_buffer("visits", visits, persistent=False)
        self.register_buffer(
            "expert_of", none.new_zeros(self.labels) if self._table else None, persistent=False
        )
        self.init_weights()

    def init_weights(self) -> None:
        """Reset the routers' biases and all counts of visits to 0."""
        for buffer in self.buffers(recurse=False):
            buffer.zero_()
        if self.expert_of is not None:
            self.expert_of += torch.tensor(self._table, device=self.expert_of.device)

    @property
    def linears(self) -> tuple[ExpertLinear, ExpertLinear]:
        """The linears that hold the experts' weights, whose first dimension is the experts."""
        return self.up, self.down

    def forward(
        self, x: Tensor, shares: Tensor | None = None, routes: Tensor | None = None,
        samples: Tensor | None = None, places: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x (·, ·, D) to the same shape; `shares`, `routes`, `samples` and `places` (·, ·) are as in `Context`. Without
        samples all tokens belong to one; without places they are in order. A mixture with labels and a learned router
        needs routes in training, to count visits by label. Raises ConfigError if routes are missing or not wanted."""
        compiled = torch.compiler.is_compiling()  # and never recomputed
        counts = self.training and torch.is_grad_enabled() and (compiled or not recomputing())
        if routes is None and (self.kind == "given" or (self.labels and counts)):
            raise ConfigError(
                "This model's experts are given for each sample; pass it routes, the number of an expert, or of a "
                "group of experts, for each."
                if self.kind == "given"
                else "This model counts visits by label; pass it routes, the label of each sample."
            )
        if routes is not None and self.kind != "given" and not self.labels:
            raise ConfigError("This model chooses its experts; leave routes out, or set router to given.")
        if self.exchange is None:
            tokens, shares = x.flatten(0, -2), None if shares is None else shares.flatten()
            places = None if places is None else places.flatten()
        else:
            tokens, (shares, routes, places) = self.exchange.enter(x, shares, routes, places)
        given = None if routes is None or self.kind != "given" else routes.reshape(-1, 1)
        given = given if given is None or self.expert_of is None else self.expert_of[given]
        if self.router is None:
            assert given is not None
            chosen, weights = given, None
        else:
            samples = (
                torch.zeros_like(tokens[:, 0], dtype=torch.int64) if samples is None else samples.flatten()
            )
            chosen, weights = self._choose(tokens, shares, given, samples)
            if self.masked and self.training:
                weights = weights * (torch.rand_like(weights) >= self.masked)
            elif self.masked:
                weights = weights * (1.0 - self.masked)
        if counts:
            self._record(chosen, shares, routes)
        beside: list[Tensor] = []

        def meanwhile() -> None:
            if self.shared is not None:
                beside.append(self.shared(x))

        out = self._visit(tokens, chosen, weights, shares, places, meanwhile)
        out = (out if self.exchange is None else self.exchange.leave(out)).view(x.shape)
        if self.shared is None:
            return out
        return out + (beside[0] if beside else self.shared(x))

    def _choose(
        self, x: Tensor, shares: Tensor | None, routes: Tensor | None, samples: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The experts of each token (T, k), where E means no expert, and their weights."""
        assert self.router is not None
        logits = self.router(x)
        if routes is not None:
            logits = logits.masked_fill(self._outside(routes), -math.inf)
        if self.training and torch.is_grad_enabled():
            if torch.compiler.is_compiling():  # and never recomputed
                again, chosen = False, self._best(logits.detach())
            else:
                again = recomputing()
                chosen = repeated(lambda: self._best(logits.detach()))
            loads = loads_of(chosen, self.experts, shares)
            if not again:
                self.loads += loads
            if self.balance or self.z_loss:
                gradient = self._balance(logits.detach(), self.last if self.stepped else loads, shares)
                logits = add_gradient(logits, gradient)
        else:
            chosen = self._best(logits)
        if self.sample_capacity is not None:
            chosen = chosen.masked_fill(self._beyond(chosen, samples), self.experts)
        numbers = chosen if self.sample_capacity is None else chosen.clamp(max=self.experts - 1)
        if self.kind == "sigmoid":
            weights = logits.gather(1, numbers).sigmoid()
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20) if self.normalises else weights
        elif self.normalises:
            weights = logits.gather(1, numbers).softmax(1)
        else:
            weights = logits.softmax(1).gather(1, numbers)
        return chosen, weights if self.scale == 1.0 else weights * self.scale

    @torch.no_grad()
    def _record(self, chosen: Tensor, shares: Tensor | None, labels: Tensor | None) -> None:
        """Add the visits (T, k) of non-padding tokens to `visits`."""
        rows, columns = len(self.visits), self.experts + 1  # the last column is for no expert
        if self.labels and labels is not None:
            chosen = chosen + labels.reshape(-1, 1) * columns
        self.visits += loads_of(chosen, rows * columns, shares).view(rows, columns)[:, :-1]

    def _outside(self, groups: Tensor) -> Tensor:
        """Mask (T, E) of the experts that are in none of a token's groups (T, n)."""
        inside = torch.zeros(len(groups), self.groups, dtype=torch.bool, device=groups.device)
        return ~inside.scatter_(1, groups, True).repeat_interleave(self.experts // self.groups, dim=1)

    def _best(self, logits: Tensor) -> Tensor:
        """The experts that the router chooses for each token, (T, k)."""
        if self.correction is not None:
            logits = logits.sigmoid() + self.correction.to(logits.dtype) * UNIT
        if self.taken < self.groups and self.kind != "given":
            scores = logits if self.correction is not None else logits.softmax(1)
            grouped = scores.view(len(scores), self.groups, self.experts // self.groups)
            sums = grouped.topk(min(self.group_best, grouped.shape[2]), dim=2).values.sum(2)
            outside = self._outside(sums.topk(self.taken, dim=1).indices)
            logits = logits.masked_fill(outside, -math.inf)
        return logits.topk(self.chosen, dim=1).indices

    def _beyond(self, chosen: Tensor, samples: Tensor) -> Tensor:
        """Mask of the visits (T, k) beyond the capacity of an expert in their sample."""
        assert self.sample_capacity is not None
        keys = samples[:, None] * self.experts + chosen
        return (places_of(keys.flatten()) >= self.sample_capacity).view_as(chosen)

    def _balance(self, logits: Tensor, loads: Tensor, shares: Tensor | None) -> Tensor:
        """The gradient of the balance loss with respect to the logits (T, E): see `penstock.models.balance_loss`."""
        softmax = logits.softmax(1)
        slope = self.balance * self.experts * (loads / loads.sum().clamp(min=1)).to(logits.dtype)
        inner = slope - (softmax * slope).sum(1, keepdim=True)
        if self.z_loss:
            inner = inner + 2.0 * self.z_loss * logits.logsumexp(1, keepdim=True)
        weight = 1.0 / max(1, len(logits)) if shares is None else shares.to(logits.dtype)[:, None]
        return softmax * inner * weight

    def _visit(
        self, x: Tensor, chosen: Tensor, weights: Tensor | None, shares: Tensor | None, places: Tensor | None,
        meanwhile: Callable[[], None],
    ) -> Tensor:  # fmt: skip
        """The weighted sum of the outputs of the chosen experts (T, k) for x (T, D). For `meanwhile` see `Exchange`."""
        k = chosen.shape[1]
        full = self.capacity is not None and self.training
        drops = full or self.sample_capacity is not None
        compiled = torch.compiler.is_compiling()
        if drops and compiled:
            chosen, weights = self._weightless(chosen, weights, shares if full else None)
        experts, order = chosen.flatten().sort(stable=True)
        loads = loads_of(chosen, self.experts)
        if drops and not compiled:
            experts, order, loads = self._dropped(chosen, shares if full else None, places)
        device = x.device.type
        cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
        seen = x.to(torch.get_autocast_dtype(device)) if cast else x
        if compiled:
            inverse = torch.empty_like(order).scatter_(
                0, order, torch.arange(len(order), device=order.device)
            )
            seen = permuted(seen, order // k, inverse, k)
        else:
            seen = spread(seen, order, k)
        if self.exchange is None:
            made = self._compute(seen, experts, loads)
        else:
            made = self.exchange.visit(seen, experts, loads, self._compute, meanwhile)
        if compiled:
            made = permuted(made, inverse, order, 1)
        else:
            made = put_rows(made, order, len(x) * k)
        if weights is None:
            return made
        made, weights = made.view(len(x), k, x.shape[1]), weights.to(made.dtype)
        if k == 2 and not compiled:
            return merged(made, weights)
        weighted: Tensor = made * weights[..., None]
        return weighted.sum(1)

    def _compute(self, rows: Tensor, experts: Tensor, loads: Tensor) -> Tensor:
        """See `Compute`."""
        ends = loads.cumsum(0).to(torch.int32)
        hidden = activate(self.up(rows, ends, experts), self.activation)
        hidden = hidden if self.dropout is None else self.dropout(hidden)
        made: Tensor = self.down(hidden, ends, experts)
        return made

    def _dropped(
        self, chosen: Tensor, shares: Tensor | None, places: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The experts of the visits within capacity, sorted, the index of each among all visits, and the visits per
        expert. With shares, padding visits no expert and needs no capacity. On a GPU this synchronises."""
        if shares is not None:
            chosen = chosen.masked_fill((shares == 0)[:, None], self.experts)
        experts, order = chosen.flatten().sort(stable=True)
        stays = experts < self.experts
        if self.capacity is not None and self.training:
            stays &= self._find_room(experts, order, chosen.shape[1], places)
        experts, order = experts[stays], order[stays]
        return experts, order, loads_of(experts, self.experts)

    def _find_room(self, experts: Tensor, order: Tensor, k: int, places: Tensor | None) -> Tensor:
        """Mask of the visits (V,), sorted by expert, within the capacity of an expert, which takes the first tokens
        over all ranks. `places` (T,) are the tokens' indices over all ranks; None: this rank has all tokens, in
        order."""
        assert self.capacity is not None
        tokens = order // k if places is None else places[order // k]
        # By expert, then by place.
        numbers = experts * _TOKENS + tokens * k + order % k
        gather = self.neighbours or torch.clone
        every = repeated(lambda: gather(numbers)).sort().values
        bounds = torch.arange(self.experts + 1, device=every.device) * _TOKENS
        first = torch.searchsorted(every, bounds)
        room = math.ceil(self.capacity * int(first[-1]) / self.experts)
        return torch.searchsorted(every, numbers) - first[experts] < room

    def _weightless(
        self, chosen: Tensor, weights: Tensor | None, shares: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same visits, with weight zero for those that `_dropped` leaves out: compiled code needs shapes that do
        not depend on their number."""
        if shares is not None:
            chosen = chosen.masked_fill((shares == 0)[:, None], self.experts)
        without = chosen == self.experts
        if self.capacity is not None and self.training:
            room = (self.capacity * (~without).sum().double() / self.experts).ceil()
            without = without | (places_of(chosen.flatten()) >= room).view_as(chosen)
        weights = torch.ones_like(chosen, dtype=torch.float32) if weights is None else weights
        return chosen.clamp(max=self.experts - 1), weights.masked_fill(without, 0.0)
