"""Experts over ranks while a model serves: any rank may have tokens, at any block, or none at all.

Neighbours form a group of `ep` ranks. Each hosts some experts, and an expert may have several replicas. A training step
visits every mixture on all ranks at the same time. Ranks that generate have other texts, of other lengths, or none. So
exchanges are made in rounds, in which all ranks of a group take part:

1. Every rank reports the mixture that it has reached, and how many of its tokens visit each expert.
2. The round is for the first mixture that any rank has reached. Ranks further on send nothing, and report again.
3. Tokens travel to hosts of their experts, and results back.

A rank that has finished its own texts reports that, and hosts its experts until all ranks have finished. A rank that
lags thus catches up with the others, and from then on their tokens share a round: as many exchanges as in training.

Note: what a placement changes. The tokens that visit an expert have one order, by rank and then by place, and are
multiplied `ROWS` at a time. A replica gets whole products. So every product has the same factors wherever it is
computed: on ranks of one kind, a placement changes no bit of any result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn

from penstock.kernels.bias_activation import activate
from penstock.kernels.padding import put_rows
from penstock.models.experts import Compute, MixtureOfExperts, mixtures_of
from penstock.parallel.dims import ParallelDims
from penstock.parallel.experts import Visits
from penstock.shards import EXPERT

ROWS = 128
"""Most rows of one product: few enough that replicas can split an expert's visits. On a CPU 512 rows took 1.13 to 1.16
times as long in four products as in one, and up to 1.32 times in eight."""
_DONE = 1 << 40
"""Reported instead of a mixture's number by a rank without remaining tokens."""
_OWN = "penstock_rounds"
"""Attribute of a model whose experts are hosted."""

Slots = tuple[tuple[int, ...], ...]
"""The experts that each rank of a group hosts, by slot."""


class Expert:
    """One expert's weights, flattened into one piece of memory."""

    def __init__(self, flat: Tensor, shapes: Sequence[torch.Size]) -> None:
        """`flat` (n,) holds weights of these shapes: up (R, D) and down (D, H), each followed by its bias. A missing
        bias has an empty shape."""
        self.flat = flat
        ends = [0, *np.cumsum([math.prod(shape) if shape else 0 for shape in shapes]).tolist()]
        self.parts = [
            flat[begin:end].view(shape) if shape else None
            for (begin, end), shape in zip(pairwise(ends), shapes, strict=True)
        ]

    def __call__(self, x: Tensor, mixture: MixtureOfExperts) -> Tensor:
        """Compute the expert: x (n, D) to (n, D)."""
        up, up_bias, down, down_bias = self.parts
        assert up is not None
        assert down is not None
        hidden = x @ up.t() if up_bias is None else x @ up.t() + up_bias
        made = activate(hidden, mixture.activation) @ down.t()
        return made if down_bias is None else made + down_bias


class Rounds:
    """The exchanges of one group of ranks, for all models that they serve together."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.group = group
        self.index, self.count = distributed.get_rank(group), distributed.get_world_size(group)
        self.hosts: list[Hosts] = []
        """The hosts of each mixture, in the order in which a pass visits them."""
        self.state = 0
        """A number that is sent to the other ranks in the next round."""
        self.states = np.zeros(self.count, np.int64)
        """The numbers of all ranks in the last round: the same on all."""

    def visit(self, rows: Tensor, loads: Tensor, hosts: Hosts) -> Tensor:
        """Results of rows (V, D), sorted by expert; `loads` (E,) is the number of rows of each expert."""
        while True:
            made = self._round(hosts.number, rows, loads)
            if made is not None:
                return made

    def attend(self) -> None:
        """Host experts until no rank has tokens left."""
        none = torch.zeros(0, dtype=torch.int64)
        while self._round(_DONE, none, none) is None:
            pass

    def _round(self, number: int, rows: Tensor, loads: Tensor) -> Tensor | None:
        """One round: the results of this rank's rows, or None if the round was for another mixture; if all ranks are
        done, the rows themselves."""
        # Mixtures may differ in their number of experts.
        most = max(len(hosted.visits) for hosted in self.hosts)
        report = torch.zeros(2 + most, dtype=torch.int64, device=self.hosts[0].no_rows.device)
        report[0], report[1] = number, self.state
        report[2 : 2 + len(loads)] = loads
        reports = [torch.empty_like(report) for _ in range(self.count)]
        distributed.all_gather(reports, report, group=self.group)
        table = torch.stack(reports).cpu().numpy()  # on a GPU the host waits here
        first, self.states = int(table[:, 0].min()), table[:, 1]
        if first == _DONE:
            return rows
        hosts = self.hosts[first]
        counts = table[:, 2 : 2 + len(hosts.visits)] * (table[:, :1] == first)
        hosts.visits += counts.sum(0)
        rows = rows if first == number else hosts.no_rows
        made = hosts.exchanged(rows, counts)
        return made if first == number else None


class Hosts(Visits):
    """One mixture's experts, on the ranks that host them. See `penstock.models.experts.Exchange`."""

    def __init__(self, mixture: MixtureOfExperts, rounds: Rounds, slots: Slots, device: torch.device) -> None:
        """Take this rank's experts from a mixture that holds all; the memory of the others is freed."""
        super().__init__(rounds.group)
        self.rounds, self.number = rounds, len(rounds.hosts)
        rounds.hosts.append(self)
        self.mixture = mixture
        weights = [each for one in mixture.linears for each in (one.weight, one.bias)]
        self.shapes = [torch.Size(()) if each is None else each.shape[1:] for each in weights]
        self.no_rows = mixture.up.weight.new_empty(0, mixture.up.in_features, device=device)
        self.visits = np.zeros(mixture.experts, np.int64)
        """(E,), number of visits by all ranks' tokens so far, including padding between prompts."""
        self.experts = {
            expert: Expert(
                torch.cat([each.detach()[expert].flatten() for each in weights if each is not None]).to(
                    device
                ),
                self.shapes,
            )
            for expert in slots[rounds.index]
        }
        """The experts that this rank hosts."""
        self.expert_bytes = sum(map(math.prod, filter(None, self.shapes))) * self.no_rows.element_size()
        self.place(slots)
        for linear in mixture.linears:
            for name, each in list(linear.named_parameters(recurse=False)):
                setattr(linear, name, nn.Parameter(each.new_empty(0, *each.shape[1:]), requires_grad=False))

    def place(self, slots: Slots) -> None:
        """Route by this placement from now on. This rank must already hold its experts; it frees all others."""
        self.slots = slots
        self.experts = {expert: self.experts[expert] for expert in slots[self.rounds.index]}
        holders: list[list[int]] = [[] for _ in self.visits]
        for rank, held in enumerate(slots):
            for expert in held:
                holders[expert].append(rank)
        self._home = np.array([ranks[0] for ranks in holders], np.int64)
        self._several = {expert: ranks for expert, ranks in enumerate(holders) if len(ranks) > 1}

    def visit(
        self, rows: Tensor, experts: Tensor, loads: Tensor, compute: Compute, meanwhile: Callable[[], None]
    ) -> Tensor:
        return self.rounds.visit(rows, loads, self)

    def hosting(self, counts: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The host of each product, and the number of the first product of each expert, (E + 1,). `counts`[r, e] is the
        number of visits of rank r to expert e. Products of an expert with several hosts go where rows are fewest."""
        totals = counts.sum(0)
        products = -(-totals // ROWS)
        first = np.concatenate([[0], products.cumsum()])
        host = self._home.repeat(products)
        if self._several:
            single_host_rows = totals.copy()
            single_host_rows[list(self._several)] = 0
            load = np.bincount(self._home, single_host_rows, self.rounds.count)
            for expert, ranks in self._several.items():
                remaining = int(totals[expert])
                for product in range(first[expert], first[expert + 1]):
                    host[product] = best = min(ranks, key=load.__getitem__)
                    load[best] += min(remaining, ROWS)
                    remaining -= ROWS
        return host, first

    def exchanged(self, rows: Tensor, counts: np.ndarray[Any, Any]) -> Tensor:
        """Results of this rank's rows (V, D), sorted by expert, in a round with `counts` (ranks, E)."""
        here, ranks = self.rounds.index, self.rounds.count
        host, first = self.hosting(counts)
        totals = counts.sum(0)
        # All rows of the round, by expert, then by the rank that owns them.
        expert = np.arange(len(totals)).repeat(totals)
        rank = np.tile(np.arange(ranks), len(totals)).repeat(counts.T.ravel())
        place = np.arange(len(expert)) - (totals.cumsum() - totals).repeat(totals)
        product = first[expert] + place // ROWS
        row_host = host[product]
        destinations = row_host[rank == here]
        order = torch.from_numpy(destinations.argsort(kind="stable")).to(rows.device)
        sent = np.bincount(destinations, minlength=ranks).tolist()
        hosted = row_host == here
        arrival = torch.from_numpy(rank[hosted].argsort(kind="stable")).to(rows.device)
        came = np.bincount(rank[hosted], minlength=ranks).tolist()
        arrived = self._sent(rows.index_select(0, order), came, sent)
        made = self._products(put_rows(arrived, arrival, len(arrival)), expert[hosted], product[hosted])
        return put_rows(self._sent(made.index_select(0, arrival), sent, came), order, len(order))

    def _sent(self, rows: Tensor, came: list[int], sent: list[int]) -> Tensor:
        """Send rows to other ranks, and return the rows received from them."""
        arrived = rows.new_empty(sum(came), rows.shape[1])
        distributed.all_to_all_single(arrived, rows.to(arrived.dtype), came, sent, group=self.group)
        return arrived

    def _products(self, rows: Tensor, expert: np.ndarray[Any, Any], product: np.ndarray[Any, Any]) -> Tensor:
        """Outputs of this rank's experts for rows, in the order of their products."""
        ends = [0, *(np.flatnonzero(np.diff(product)) + 1).tolist(), len(product)] if len(product) else [0]
        made = [
            self.experts[int(expert[begin])](rows[begin:end], self.mixture) for begin, end in pairwise(ends)
        ]
        return torch.cat(made) if made else rows


def even_slots(experts: int, ranks: int) -> Slots:
    """Consecutive experts on each rank, as evenly as possible."""
    bounds = [experts * rank // ranks for rank in range(ranks + 1)]
    return tuple(tuple(range(begin, end)) for begin, end in pairwise(bounds))


def host_experts(
    model: nn.Module, dims: ParallelDims, device: torch.device, *, slots: Sequence[Slots] = (),
    beside: nn.Module | None = None,
) -> None:  # fmt: skip
    """Host the experts of a model on the ranks of `dims`, in place, for inference only. All ranks must have the same
    weights before; afterwards experts' weights are on their hosts, on `device`, and no longer parameters.

    `slots` are the experts of each rank, for each mixture; by default equally many per rank. A model `beside` is served
    together with this one, for example the model it drafts for: their exchanges share the same rounds.
    """
    assert dims.expert_mesh is not None
    rounds = None if beside is None else rounds_of(beside)
    rounds = rounds or Rounds(dims.expert_mesh[EXPERT].get_group())
    mixtures = mixtures_of(model)
    for number, mixture in enumerate(mixtures):
        placed = slots[number] if slots else even_slots(mixture.experts, rounds.count)
        mixture.exchange = Hosts(mixture, rounds, placed, device)
    model.__dict__[_OWN] = rounds


def rounds_of(model: nn.Module) -> Rounds | None:
    """The rounds of a model whose experts are hosted by several ranks."""
    rounds: Rounds | None = model.__dict__.get(_OWN)
    return rounds


def attend(model: nn.Module) -> None:
    """Host experts for the other ranks until all are done; called by a rank that has finished its own texts."""
    rounds = rounds_of(model)
    if rounds is not None:
        rounds.attend()
