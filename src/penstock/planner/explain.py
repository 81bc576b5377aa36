"""Explanations: where a layout spends its time, why other layouts are slower, and what would help most."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.config.machine import LinkRates, Machine
from penstock.config.model import ModelConfig
from penstock.config.plan import Plan
from penstock.errors import PenstockError
from penstock.planner.layouts import vary
from penstock.planner.loads import EVEN
from penstock.planner.prediction import Prediction, predict, room
from penstock.planner.search import Layouts, base_of, explore, needed_bytes, search
from penstock.report.units import GIB, duration, rounded

SECOND_WORDS = {
    "gemm": "matrix products", "attention": "attention",
    "pointwise": "norms, activations and other memory-bound operators",
    "recompute": "recomputing activations in the backward pass", "output": "output and loss",
    "tensor": "tensor parallel collectives, exposed", "expert": "expert parallel exchanges",
    "context": "context parallel exchanges, exposed", "pipeline": "transfers between stages, exposed",
    "bubble": "pipeline bubble", "data": "data parallel collectives, exposed",
    "optimizer": "optimizer, and adding up gradients",
    "owners": "updates sent to the owners of matrices and back",
    "offload": "copies to the host's memory and back, exposed",
    "host_wait": "host work between steps", "straggling": "waiting for the slowest replica",
    "launch": "waiting for the host", "pages": "pages of freed memory mapped again",
}  # fmt: skip
MEMORY_WORDS = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer states",
    "master_weights": "master weights", "activations": "activations", "output": "output and loss",
    "working": "a block's backward pass", "gathered_weights": "gathered weights",
    "whole_gradients": "gradients before reduction", "communication": "communication buffers",
    "fragmentation": "fragmentation", "temporary": "temporaries",
}  # fmt: skip
BEND = 0.03
"""Growth of the device time per sample, between two numbers of devices, that is worth reporting."""
AXES = ("tp", "pp", "micro_batch", "virtual", "sharding", "recompute", "ep", "cp")
"""Fields of a Plan that can be chosen; dp follows."""


def explain(
    model: ModelConfig, machine: Machine, plan: Plan, uneven: Mapping[int, float] = EVEN
) -> list[str]:
    """One layout in sentences: where its time and memory go, and whether it fits. Raises ConfigError as `predict`
    does."""
    best = predict(model, machine, plan, uneven=uneven)
    lines = [
        f"{plan.line()}",
        f"{best.gpus} {machine.name}: {duration(best.iteration_seconds, 3)} a step of {best.global_batch} samples, "
        f"MFU {best.mfu:.1%}, HFU {best.hfu:.1%} of {rounded(best.peak_flops / 1e12, 3)} TFLOP/s ({best.peak_name}).",
    ]
    if best.interval is not None:
        lines.append(f"It would take {best.interval.seconds(best.iteration_seconds)}.")
    for name, seconds, share in _largest(best.seconds):
        lines.append(f"  {duration(seconds, 3):>10}  {share:6.1%}  {SECOND_WORDS.get(name, name)}")
    spare = room(machine) - best.memory_bytes
    words = f"{spare / GIB:.1f} GiB to spare" if spare >= 0 else f"{-spare / GIB:.1f} GiB too much"
    if not machine.memory_bytes:
        words = "the machine's memory is unknown"
    lines.append(f"Memory {best.memory_bytes / GIB:.1f} GiB on the fullest device: {words}.")
    for name, size, share in _largest(best.memory):
        lines.append(f"  {size / GIB:10.2f} GiB  {share:6.1%}  {MEMORY_WORDS.get(name, name)}")
    if best.activations:
        kinds = [
            f"{name.replace('_', ' ')} {size / GIB:.2f} GiB"
            for name, size, _ in _largest(best.activations)
            if size > GIB / 200
        ]
        largest_kinds = ", ".join(kinds)
        micro_batches = f" of {best.micro_batches_held:.3g} micro-batches" if plan.pp > 1 else ""
        lines.append(f"Activations{micro_batches}: {largest_kinds or 'less than 0.01 GiB'}.")
    return lines


def _largest(parts: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Parts above 0.05 % of the total, with their shares, the largest first."""
    whole = sum(parts.values())
    return [
        (name, part, part / whole)
        for name, part in sorted(parts.items(), key=lambda item: -item[1])
        if part > whole / 2000
    ]


def why_others_lose(
    model: ModelConfig, machine: Machine, result: Layouts, best: Prediction, uneven: Mapping[int, float] = EVEN
) -> Iterator[str]:  # fmt: skip
    """Sentences on each choice of the best layout: the fastest layout with another choice and its extra cost, then
    layouts that do not fit. A layout is named once, under the first choice in which it differs."""
    named = {best.plan}
    for axis in AXES:
        chosen = getattr(best.plan, axis)
        others: dict[object, Prediction] = {}
        for other in result:
            others.setdefault(getattr(other.plan, axis), other)
        others.pop(chosen, None)
        for value, other in sorted(others.items(), key=lambda item: item[1].iteration_seconds)[:2]:
            if other.plan in named:
                continue
            named.add(other.plan)
            differing = [name for name in AXES if getattr(other.plan, name) != getattr(best.plan, name)]
            besides = [f"{name}={getattr(other.plan, name)}" for name in differing if name != axis]
            at = f" (at best with {', '.join(besides)})" if besides else ""
            slower = _slower_by(best, other)
            cost = _cost(best, other) if slower >= 5e-4 else "as fast"
            yield f"{axis}={value} instead of {chosen}{at}: {cost}."
    yield from _too_large(model, machine, best, uneven)
    if result.too_large:
        yield f"{result.too_large:,} of {result.tried:,} layouts do not fit."


def bends(points: Sequence[tuple[int, int, Mapping[str, float]]]) -> list[str]:
    """Sentences on where scaling over devices stops being perfect, and on the causes.

    Each point is a number of devices, the samples of a step, and the step's seconds by part; in ascending order of
    devices.
    """
    sentences = []
    for (fewer, few_samples, few), (more, more_samples, many) in itertools.pairwise(points):
        growth = {
            name: more * many.get(name, 0.0) / more_samples - fewer * few.get(name, 0.0) / few_samples
            for name in few.keys() | many.keys()
        }
        dearer = sum(growth.values()) / (fewer * sum(few.values()) / few_samples)
        if dearer > BEND:
            name = max(sorted(growth), key=lambda name: growth[name])
            sentences.append(
                f"From {fewer:,} to {more:,} devices a sample takes {dearer:.0%} more device time, most of it for "
                f"{SECOND_WORDS.get(name, name)}."
            )
    return sentences or ["Each sample takes nearly the same device time on all these numbers of devices."]


def _slower_by(best: Prediction, other: Prediction) -> float:
    """The other layout's time per sample over the best one's, less one."""
    return best.samples_per_second / other.samples_per_second - 1


def _cost(best: Prediction, other: Prediction) -> str:
    """How much slower the other layout is, and its largest extra cost for the same samples."""
    slower, scale = _slower_by(best, other), best.global_batch / other.global_batch
    equal = best.interval is not None and slower <= best.interval.spread
    more = {name: seconds * scale - best.seconds.get(name, 0.0) for name, seconds in other.seconds.items()}
    name = max(more, key=lambda key: more[key])
    reason = f"{duration(more[name], 3)} more for {SECOND_WORDS.get(name, name)}"
    if name == "bubble":
        reason = f"a bubble of {other.bubble_fraction:.1%} against {best.bubble_fraction:.1%}"
    return f"{slower:.1%} slower{', which is equal within the error' if equal else ''}: {reason}"


def _too_large(
    model: ModelConfig, machine: Machine, best: Prediction, uneven: Mapping[int, float]
) -> Iterator[str]:
    """Layouts one choice away from the best that would be faster if they fitted."""
    limit = room(machine)
    plan = best.plan
    neighbours: list[tuple[str, Plan]] = []
    if plan.recompute != "none":
        neighbours.append(("recompute=none", vary(plan, recompute="none", budget=0.0)))
    if plan.accumulate % 2 == 0:
        larger = vary(plan, micro_batch=2 * plan.micro_batch, accumulate=plan.accumulate // 2)
        neighbours.append((f"micro_batch={larger.micro_batch}", larger))
    if plan.tp % 2 == 0:
        neighbours.append((f"tp={plan.tp // 2}", vary(plan, tp=plan.tp // 2, dp=plan.dp * 2, sp=plan.tp > 2)))
    for words, other in neighbours:
        bytes_needed = needed_bytes(model, machine, other, uneven)
        if bytes_needed > limit:
            yield f"{words}, and all else as in the best: {(bytes_needed - limit) / GIB:.1f} GiB too much."


@dataclass(frozen=True, slots=True)
class Lever:
    """One change to machine or batch, and how much faster the best layout under it is, per sample."""

    words: str
    gain: float
    """Samples per second over those without the change, less one."""
    plan: Plan


_LINKS = [name for name in LinkRates.__dataclass_fields__ if name.endswith("bytes_per_second")]


def _faster(of: Any, factor: float, *names: str) -> Any:
    """A copy whose known figures of these names are times a factor; each is a number, or numbers by type."""

    def times(value: Any) -> Any:
        return (
            {kind: factor * rate for kind, rate in value.items()}
            if isinstance(value, dict)
            else factor * value
        )

    return replace(of, **{name: value and times(value) for name in names for value in [getattr(of, name)]})


def sensitivity(
    model: ModelConfig, machine: Machine, gpus: int, best: Prediction, *, base: Plan | None = None,
    fixed: frozenset[str] = frozenset(), uneven: Mapping[int, float] = EVEN,
) -> list[Lever]:  # fmt: skip
    """The changes that would help most, the largest gain first; each is searched for its own best layout."""
    linked = replace(machine, pairs=machine.pairs and _faster(machine.pairs, 2, *_LINKS))
    multiplies = replace(machine, gemm=tuple(_faster(one, 1.2, "flops_per_second") for one in machine.gemm))
    changes: dict[str, Machine] = {
        "twice the memory": _faster(machine, 2, "memory_bytes"),
        "twice the memory bandwidth": _faster(machine, 2, "memory_bytes_per_second"),
        "links inside a node twice as fast": _faster(linked, 2, "link_bytes_per_second", *_LINKS),
        "links between nodes twice as fast": _faster(machine, 2, "node_bytes_per_second"),
        "matrix products a fifth faster": _faster(multiplies, 1.2, "peak_flops", "achievable_flops"),
        "twice the global batch": machine,
    }
    levers = []
    for words, changed in changes.items():
        samples = best.global_batch * (2 if changed is machine else 1)
        try:
            result = explore(
                model, changed, gpus, global_batch=samples, base=base, fixed=fixed, keep=1, uneven=uneven
            )
        except PenstockError:
            continue
        if result:
            first = result[0]
            levers.append(Lever(words, first.samples_per_second / best.samples_per_second - 1, first.plan))
    return sorted(levers, key=lambda lever: -lever.gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestLayout:
    """The best layout with the settings of a line."""

    best: Prediction
    assumed: str
    """Settings that the line leaves open and the planner chose, with the reasons; empty for none."""
    result: Layouts
    """The search; for a line that is a complete layout, this layout alone."""

    def against(self, best: Prediction) -> str:
        """A sentence that compares this layout with the best of all."""
        one = self.best
        if not one.fits:
            return f"It does not fit: it needs {one.memory_bytes / GIB:.1f} GiB."
        if one.plan == best.plan:
            return "It is the best of all."
        if (slower := _slower_by(best, one)) < 0:
            return f"{-slower:.1%} faster than the best that the search tries."
        return f"{_cost(best, one)}."


def is_layout(line: str, gpus: int | None) -> bool:
    """Whether a line is a complete layout: it names a degree and a batch, and uses `gpus` devices where these are
    given. Other lines fix some settings, and the rest is searched."""
    named = Plan.named(line)
    whole = named & {"dp", "tp", "pp", "cp"} and named & {"micro_batch", "accumulate"}
    return bool(whole) and gpus in (None, Plan.parse(line).gpus)


def with_base(base: str | None, line: str | None) -> str:
    """The settings of two Plan lines; `line` overrides the base."""
    named = Plan.named(line or "")
    kept = [word for word in (base or "").split() if word.partition("=")[0] not in named]
    return " ".join([*kept, line or ""]).strip()


def answer(
    model: ModelConfig, machine: Machine, gpus: int, line: str | None = None, *, global_batch: int | None = None,
    uneven: Mapping[int, float] = EVEN, name: str = "",
) -> BestLayout:  # fmt: skip
    """The best layout on `gpus` devices with the settings of a Plan line; None means no settings. `name` is the model's
    name where it is not the preset's.

    Raises OutOfMemory, which says what would make it fit, and ConfigError for impossible settings.
    """
    base = base_of(line, model, machine, gpus)
    assumed = f"assumed, for the line names no precision: {base.assumed}" if base.assumed else ""
    if line is not None and is_layout(line, gpus):
        one = predict(model, machine, base.plan, uneven=uneven)
        return BestLayout(best=one, assumed=assumed, result=Layouts([one], tried=1))
    layouts = search(
        model, machine, gpus, global_batch=global_batch, base=base.plan, fixed=base.fixed, keep=None, uneven=uneven,
        name=name,
    )  # fmt: skip
    return BestLayout(best=layouts[0], assumed=assumed, result=layouts)
