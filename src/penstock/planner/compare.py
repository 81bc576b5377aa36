"""The best layouts that lines of settings allow, one for each line, and how they compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.config.plan import Plan
from penstock.errors import OutOfMemory
from penstock.planner.explain import difference
from penstock.planner.loads import EVEN
from penstock.planner.prediction import Prediction, predict
from penstock.planner.search import SearchResult, base_of, explore, nothing_fits
from penstock.report.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class BestLayout:
    """The best layout that a line allows."""

    best: Prediction
    assumed: str
    """Settings that the line leaves open and the planner chose, with why; empty for none."""
    result: SearchResult
    """The search; of a line that is a whole layout, it alone."""

    def against(self, best: Prediction) -> str:
        """How this layout compares with the best of all, in a sentence."""
        one = self.best
        if not one.fits:
            return f"It does not fit: it needs {one.memory_bytes / GIB:.1f} GiB."
        if one.plan == best.plan:
            return "It is the best of all."
        slower = one.iteration_seconds / one.global_batch / (best.iteration_seconds / best.global_batch) - 1
        if slower < 0:
            return f"{-slower:.1%} faster than the best that the search tries."
        equal = best.interval is not None and slower <= best.interval.spread
        within = ", which is equal within the error" if equal else ""
        return f"{slower:.1%} slower{within}: {difference(best, one)}."


def is_layout(line: str, gpus: int | None) -> bool:
    """Whether a line is one whole layout: it names a degree and a batch, and takes `gpus` devices where these are
    given. Any other is a wish for some settings, whose rest is searched."""
    named = Plan.named(line)
    whole = named & {"dp", "tp", "pp", "cp"} and named & {"micro_batch", "accumulate"}
    return bool(whole) and gpus in (None, Plan.parse(line).gpus)


def with_base(base: str | None, line: str | None) -> str:
    """The settings of two Plan lines; where both name one, that of `line`."""
    named = Plan.named(line or "")
    kept = [word for word in (base or "").split() if word.partition("=")[0] not in named]
    return " ".join([*kept, line or ""]).strip()


def answer(
    model: ModelConfig, machine: Machine, gpus: int, line: str | None = None, *, global_batch: int | None = None,
    uneven: Mapping[int, float] = EVEN, name: str = "",
) -> BestLayout:  # fmt: skip
    """The best layout on `gpus` devices with the settings of a Plan line; None is the best of all. `name` is what the
    model is called where that is not its preset's name.

    Raises OutOfMemory saying what would make it fit, and ConfigError for settings that cannot be.
    """
    base = base_of(line, model, machine, gpus)
    assumed = f"assumed, for the line names no precision: {base.assumed}" if base.assumed else ""
    if line is not None and is_layout(line, gpus):
        one = predict(model, machine, base.plan, uneven=uneven)
        return BestLayout(best=one, assumed=assumed, result=SearchResult([one], tried=1))
    result = explore(
        model, machine, gpus, global_batch=global_batch, base=base.plan, fixed=base.fixed, keep=None, uneven=uneven
    )  # fmt: skip
    if not result.predictions:
        problem = nothing_fits(
            model, machine, gpus, result, uneven, global_batch=global_batch, fixed=base.fixed, name=name
        )
        raise OutOfMemory(problem)
    return BestLayout(best=result.predictions[0], assumed=assumed, result=result)
