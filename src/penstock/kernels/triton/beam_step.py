"""A step of beam search in two launches: see penstock/kernels/beam_step.py for what it does.

The first launch reads the logits once. A program handles SPAN logits of one beam and stores the K largest, the maximum,
and the sum of exponentials relative to it. The second has a program for each text: it computes log-probabilities of the
stored candidates, picks the K best of all beams one after the other, and then does the rest of the step on these few
values. The sum over the vocabulary needs no other pass, and nothing waits for the host.

Among equal values the first is taken.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.beams import Beams, Step, Terms
from penstock.kernels.triton.common import on, power_above

SPAN = 4096
MOST = 16384
"""Most candidates of a text that one program of the second launch can hold."""
_OUT = tl.constexpr(-1e9)
_NONE = tl.constexpr(float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def candidates_kernel(  # type: ignore[no-untyped-def]
    logits,  # (R, V)
    largest,  # (R, S), of each span
    sums,  # (R, S), of exponentials of logit − largest
    values,  # (R, S, K)
    tokens,  # (R, S, K) int32
    size,  # V
    SPAN: tl.constexpr,
    KEPT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    lane = tl.arange(0, SPAN)
    at = part * SPAN + lane
    inside = at < size
    left = tl.load(logits + row * size + at, inside, other=_NONE).to(tl.float32)
    most = tl.max(left, 0)
    # A span with nothing but −∞ would give NaN.
    below = tl.where(most == _NONE, 0.0, most)
    place = row * parts + part
    tl.store(largest + place, most)
    tl.store(sums + place, tl.sum(tl.exp(left - below), 0))
    for number in range(KEPT):
        value, where = tl.max(left, 0, return_indices=True)
        tl.store(values + place * KEPT + number, value)
        tl.store(tokens + place * KEPT + number, part * SPAN + where)
        left = tl.where(lane == where, _NONE, left)


@triton.jit(do_not_specialize=["step", "last"])  # type: ignore[untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]
    largest,
    sums,
    values,
    tokens,
    scores,  # these five as in `Beams`: (B, b), the last (B, 1)
    done_scores,
    done,
    finished,
    hopeful,
    stops,  # (ENDS,) int64
    new_scores,  # the same after the step
    new_done_scores,
    new_done,
    new_finished,
    new_hopeful,
    parents,  # (B, b) int64
    chosen,  # (B, b) int64
    step,
    last,  # 1 in the last step, else 0
    divisor,
    ahead,
    parts,  # S
    each,  # S · K
    BEAMS: tl.constexpr,
    KEPT: tl.constexpr,
    ENDS: tl.constexpr,
    NORMED: tl.constexpr,
    FULL: tl.constexpr,
    BEAMS_WIDE: tl.constexpr,  # sizes rounded up to powers of two, which Triton's shapes must be
    PARTS_WIDE: tl.constexpr,
    EACH_WIDE: tl.constexpr,
    KEPT_WIDE: tl.constexpr,
):
    text = tl.program_id(0).to(tl.int64)
    beam = tl.arange(0, BEAMS_WIDE)
    real = beam < BEAMS
    row = text * BEAMS + beam

    # The K best of all beams, one after the other.
    score = tl.load(scores + row, real, other=_NONE)
    if not NORMED:
        part = tl.arange(0, PARTS_WIDE)
        place = row[:, None] * parts + part[None, :]
        within = real[:, None] & (part < parts)[None, :]
        most = tl.load(largest + place, within, other=_NONE)
        total = tl.load(sums + place, within, other=0.0)
        top = tl.max(most, 1)
        top = tl.where(top == _NONE, 0.0, top)
        total = tl.sum(total * tl.exp(most - top[:, None]), 1)
        score = score - tl.where(real, top + tl.log(tl.where(real, total, 1.0)), 0.0)
    number = tl.arange(0, EACH_WIDE)
    within = real[:, None] & (number < each)[None, :]
    value = tl.load(values + row[:, None] * each + number[None, :], within, other=_NONE)
    left = tl.reshape(value + score[:, None], [BEAMS_WIDE * EACH_WIDE])
    place = tl.arange(0, BEAMS_WIDE * EACH_WIDE)
    lane = tl.arange(0, KEPT_WIDE)
    own = lane < BEAMS
    best = tl.full([KEPT_WIDE], _NONE, tl.float32)
    parent = tl.zeros([KEPT_WIDE], tl.int64)
    token = tl.zeros([KEPT_WIDE], tl.int64)
    for i in range(KEPT):
        highest, where = tl.max(left, 0, return_indices=True)
        left = tl.where(place == where, _NONE, left)
        line = where // EACH_WIDE
        picked = tl.load(tokens + (text * BEAMS + line) * each + where % EACH_WIDE)
        best = tl.where(lane == i, highest, best)
        parent = tl.where(lane == i, line.to(tl.int64), parent)
        token = tl.where(lane == i, picked.to(tl.int64), token)
    ending = lane < 0
    for i in range(ENDS):
        ending = ending | (token == tl.load(stops + i))

    # Merge candidates among the best b that end with the finished texts: keep the best b of both.
    hope = tl.load(hopeful + text) != 0
    there = tl.load(done_scores + text * BEAMS + lane, own, other=_NONE)
    there_code = tl.load(done + text * BEAMS + lane, own, other=0)
    there_real = tl.load(finished + text * BEAMS + lane, own, other=1).to(tl.int32)
    may_end = hope
    if FULL:
        may_end = hope & (tl.min(there_real, 0) == 0)
    counts = (ending | (last != 0)) & own
    new = tl.where(counts & may_end, best / divisor, _OUT)
    new = tl.where(own, new, _NONE)
    new_code = (
        ((tl.zeros([KEPT_WIDE], tl.int64) + step) << 40) + (parent << 32) + tl.where(ending, 0, token + 1)
    )
    new_real = counts.to(tl.int32)
    worst = float("inf")
    count = 0
    for i in range(BEAMS):
        first, at = tl.max(there, 0, return_indices=True)
        other, at_other = tl.max(new, 0, return_indices=True)
        newer = first < other  # among equals the older stays
        taken = lane == tl.where(newer, at_other, at)
        code = tl.sum(tl.where(taken, tl.where(newer, new_code, there_code), 0), 0)
        is_real = tl.sum(tl.where(taken, tl.where(newer, new_real, there_real), 0), 0)
        there = tl.where(lane == at, tl.where(newer, there, _NONE), there)
        new = tl.where(lane == at_other, tl.where(newer, _NONE, new), new)
        better = tl.maximum(first, other)
        tl.store(new_done_scores + text * BEAMS + i, better)
        tl.store(new_done + text * BEAMS + i, code)
        tl.store(new_finished + text * BEAMS + i, is_real)
        worst = tl.minimum(worst, better)
        count += is_real

    # The best b of the others continue, while the best of them can still beat the worst finished text.
    on = tl.where(lane < KEPT, tl.where(ending, best + _OUT, best), _NONE)
    hoped = tl.max(on, 0) / ahead
    for i in range(BEAMS):
        highest, at = tl.max(on, 0, return_indices=True)
        taken = lane == at
        tl.store(new_scores + text * BEAMS + i, highest)
        tl.store(parents + text * BEAMS + i, tl.sum(tl.where(taken, parent, 0), 0))
        tl.store(chosen + text * BEAMS + i, tl.sum(tl.where(taken, token, 0), 0))
        on = tl.where(taken, _NONE, on)
    beats = ((count > 0) & (hoped > worst)) | ((count < BEAMS) & (hoped > _OUT))
    tl.store(new_hopeful + text, (hope & beats).to(tl.int32))


def fits(terms: Terms, size: int) -> bool:
    """Whether one program can hold a text's candidates, for a vocabulary of `size`."""
    parts = -(-size // SPAN)
    return power_above(terms.size) * power_above(parts * min(terms.kept, size)) <= MOST


def launch(logits: Tensor, beams: Beams, step: int, terms: Terms, *, normed: bool) -> Step:
    """The same as `penstock.kernels.beam_step.plain_step`, for terms that fit."""
    count, size = logits.shape
    texts, each_beam = len(beams.scores), min(terms.kept, size)
    parts, kept = -(-size // SPAN), min(terms.kept, terms.size * each_beam)
    device, words = logits.device, torch.int64
    largest, sums = torch.empty(2, count, parts, device=device).unbind()
    values = torch.empty(count, parts, each_beam, device=device)
    tokens = torch.empty(count, parts, each_beam, device=device, dtype=torch.int32)
    scores, done_scores = (torch.empty_like(beams.scores) for _ in range(2))
    done, parents, chosen = (torch.empty(texts, terms.size, dtype=words, device=device) for _ in range(3))
    finished = torch.empty(texts, terms.size, dtype=torch.bool, device=device)
    hopeful = torch.empty(texts, 1, dtype=torch.bool, device=device)
    divisor, ahead = terms.divisors(step)
    with on(logits):
        candidates_kernel[(count, parts)](
            logits.contiguous(), largest, sums, values, tokens, size, SPAN=SPAN, KEPT=each_beam, num_warps=8
        )
        merge_kernel[(texts,)](
            largest, sums, values, tokens,
            *(each.contiguous() for each in beams[:3]), *(each.contiguous().view(torch.int8) for each in beams[3:5]),
            _stops(terms.stops, device), scores, done_scores, done, finished.view(torch.int8), hopeful.view(torch.int8),
            parents, chosen, step, int(step + 1 == terms.steps), float(divisor), float(ahead), parts, parts * each_beam,
            BEAMS=terms.size, KEPT=kept, ENDS=len(terms.stops), NORMED=normed, FULL=terms.stopping == "full",
            BEAMS_WIDE=power_above(terms.size), PARTS_WIDE=power_above(parts), EACH_WIDE=power_above(parts * each_beam),
            KEPT_WIDE=power_above(max(kept, terms.size)), num_warps=8,
        )  # fmt: skip
    return Step(Beams(scores, done_scores, done, finished, hopeful, False), parents, chosen)


_known: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _stops(stops: tuple[int, ...], device: torch.device) -> Tensor:
    """The stops on the device, sent once."""
    if (stops, device) not in _known:
        _known[stops, device] = torch.tensor(stops or (0,), dtype=torch.int64, device=device)
    return _known[stops, device]
