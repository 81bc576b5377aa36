"""A mixture of experts in place of a block's perceptron (Shazeer et al., ICLR 2017).

Shapes: T tokens, D width, E experts, k experts of a token, V visits of tokens to experts (T·k where none is dropped), M
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
from penstock.kernels.dropout import Dropout
from penstock.kernels.padding import put_rows
from penstock.models.balance_loss import add_gradient
from penstock.models.expert_linear import ExpertLinear
from penstock.models.perceptron import MLP, activate
from penstock.models.router import Router, recomputing, repeated
from penstock.models.visits import loads_of, merged, permuted, places_of, spread

Facts = list[Tensor | None]
"""Facts about tokens, (T,) each: shares, routes, places."""
Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The products of experts: of rows (V, D) sorted by expert, the experts of these (V,), and how many rows each has."""
_TOKENS = 1 << 40
"""More visits than a micro-batch has."""
UNIT = 2.0**-50
"""Biases of sigmoid routers are multiples of it, held as integers, which no cast to half precision rounds."""


def mixtures_of(model: nn.Module) -> list[MixtureOfExperts]:
    """The mixtures of a model that this process holds, in their order: other pipeline stages' have no weights here."""
    return [m for m in model.modules() if isinstance(m, MixtureOfExperts) and m.up.weight is not None]


@torch.no_grad()
def balance(mixtures: Sequence[MixtureOfExperts], add_up: Callable[[list[Tensor]], None]) -> None:
    """After a step: take over the loads of its micro-batches, which `add_up` adds up over ranks, in place, and move the
    biases of sigmoid routers by them."""
    add_up([mixture.loads for mixture in mixtures])
    for mixture in mixtures:
        loads = mixture.loads
        if mixture.correction is not None:
            # Few means below the mean, in whole numbers: E · load against the sum of loads.
            few = torch.sign(loads.sum() - len(loads) * loads)
            mixture.correction += (few * round(mixture.bias_rate / UNIT)).to(torch.int64)
        mixture.last.copy_(loads)
        loads.zero_()


class Exchange(Protocol):
    """How other ranks take part in a mixture: see `penstock.parallel.experts`."""

    splits_tokens: bool
    """Whether ranks that have the same tokens route a part of them each, which they count together."""

    def enter(self, x: Tensor, shares: Tensor | None, *facts: Tensor | None) -> tuple[Tensor, Facts]:
        """The tokens (T, D) of x (·, ·, D) that are routed here, with their shares and other facts (T,)."""

    def visit(
        self, rows: Tensor, experts: Tensor, loads: Tensor, compute: Compute, meanwhile: Callable[[], None]
    ) -> Tensor:
        """The results of rows (V, D), sorted by expert, that `compute` makes where their experts are: `experts` (V,)
        are the numbers of these, and `loads` (E,) how many visit each. `meanwhile` may be called once while rows are
        on their way."""

    def leave(self, out: Tensor) -> Tensor:
        """The results of tokens that were routed here, (T, D), as the rest of the block takes them."""


class MixtureOfExperts(nn.Module):
    """A perceptron for each of several experts, of which a token visits those that the router chooses.

    The result is the sum over a token's experts of their outputs times their weights, and of those of the shared
    experts, which every token visits. Visits are sorted by expert, so that the products of all experts are one.
    """

    correction: Tensor | None
    """(E,) int32: what is added to an expert's sigmoid where experts are chosen, in units of 2⁻²⁴."""
    loads: Tensor
    """(E,) int64: visits of the micro-batches of a step so far."""
    last: Tensor
    """The same of the step before, over all ranks."""
    visits: Tensor
    """(L, E) int64: visits in training, of this process alone, by the label of the sample; one row without labels.
    Those that a capacity drops are among them."""
    expert_of: Tensor | None
    """(L,) int64, the expert of each label, where experts are given and labels share them."""

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
            # Several that every token visits are one of their common width.
            self.shared = MLP(sizes, layer, hidden=expert.width * mixture.shared_experts, **where)
        self.stepped = False
        """Whether `balance` follows each step."""
        self.exchange: Exchange | None = None
        """How other ranks take part; None where all tokens and experts are here."""
        self.neighbours: Callable[[Tensor], Tensor] | None = None
        """Brings together numbers (V,) of the ranks that have other tokens of the same samples, if there are any."""
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
        """No expert is preferred, and no visits are counted."""
        for buffer in self.buffers(recurse=False):
            buffer.zero_()
        if self.expert_of is not None:
            self.expert_of += torch.tensor(self._table, device=self.expert_of.device)

    @property
    def linears(self) -> tuple[ExpertLinear, ExpertLinear]:
        """The parts whose weights are those of the experts, with a first dimension of these."""
        return self.up, self.down

    def forward(
        self, x: Tensor, shares: Tensor | None = None, routes: Tensor | None = None,
        samples: Tensor | None = None, places: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x (·, ·, D) to the same; `shares`, `routes`, `samples` and `places` (·, ·) are as in `Context`; without
        samples all tokens are of one, and without places they are in order. A router of its own needs routes in
        training, to count visits by label, if it has labels.
        Raises ConfigError where routes are missing or not wanted."""
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
        """The experts of each token (T, k), and their weights. The number E stands for no expert."""
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
        """Add the visits (T, k) of tokens that are no padding to the record."""
        rows, columns = len(self.visits), self.experts + 1  # the last for no expert
        if self.labels and labels is not None:
            chosen = chosen + labels.reshape(-1, 1) * columns
        self.visits += loads_of(chosen, rows * columns, shares).view(rows, columns)[:, :-1]

    def _outside(self, groups: Tensor) -> Tensor:
        """Which experts are in none of a token's groups (T, n): (T, E)."""
        inside = torch.zeros(len(groups), self.groups, dtype=torch.bool, device=groups.device)
        return ~inside.scatter_(1, groups, True).repeat_interleave(self.experts // self.groups, dim=1)

    def _best(self, logits: Tensor) -> Tensor:
        """The numbers of the experts that are chosen, (T, k)."""
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
        """Which visits (T, k) find no room in their sample."""
        assert self.sample_capacity is not None
        keys = samples[:, None] * self.experts + chosen
        return (places_of(keys.flatten()) >= self.sample_capacity).view_as(chosen)

    def _balance(self, logits: Tensor, loads: Tensor, shares: Tensor | None) -> Tensor:
        """The gradient of the balance loss at the logits (T, E): see `penstock.models.balance_loss`."""
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
        """The outputs of the chosen experts (T, k) for x (T, D), times their weights, summed. For `meanwhile` see
        `Exchange`."""
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
        """The experts of visits that find room, in order, the number of each among all, and how many each expert has.
        With shares, padding takes no room, and visits none. On a GPU this waits."""
        if shares is not None:
            chosen = chosen.masked_fill((shares == 0)[:, None], self.experts)
        experts, order = chosen.flatten().sort(stable=True)
        stays = experts < self.experts
        if self.capacity is not None and self.training:
            stays &= self._find_room(experts, order, chosen.shape[1], places)
        experts, order = experts[stays], order[stays]
        return experts, order, loads_of(experts, self.experts)

    def _find_room(self, experts: Tensor, order: Tensor, k: int, places: Tensor | None) -> Tensor:
        """Whether visits (V,), sorted by expert, find room on an expert that takes those of the first tokens of all
        ranks. `places` (T,) are the tokens' places among those of all ranks; none: these have them all, in order."""
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
        """The same visits with a weight of zero for those that `_dropped` leaves out: compiled code cannot wait to know
        how many these are."""
        if shares is not None:
            chosen = chosen.masked_fill((shares == 0)[:, None], self.experts)
        without = chosen == self.experts
        if self.capacity is not None and self.training:
            room = (self.capacity * (~without).sum().double() / self.experts).ceil()
            without = without | (places_of(chosen.flatten()) >= room).view_as(chosen)
        weights = torch.ones_like(chosen, dtype=torch.float32) if weights is None else weights
        return chosen.clamp(max=self.experts - 1), weights.masked_fill(without, 0.0)
