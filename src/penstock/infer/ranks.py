"""Ranks that generate together: those of `tp` split each layer, those of `pp` have some blocks each, those of `dp`
split the texts of a call, and those of `ep` host some experts each, for the texts of all.

Every rank makes the same calls, with the same prompts and settings, and is given all texts. Ranks that share a model
out take the same steps. What they choose tokens by is the same on all of them to the bit, for sums over ranks, gathered
logits and the features of the last stage are; so each chooses by itself, and no token is sent. Where texts are drawn
without a seed, rank 0 draws one for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import distributed

from penstock.config.plan import Plan
from penstock.config.rules import inference_problems
from penstock.errors import ConfigError
from penstock.parallel import ParallelDims, joined, launched
from penstock.parallel.dims import DATA

T = TypeVar("T")
_DEGREES = ("dp", "tp", "pp", "ep")


def require_ranks(plan: Plan, size: int, **more: Any) -> None:
    """Raise ConfigError, with all reasons, unless `size` processes can generate as the Plan says. `more` is as of
    `penstock.config.rules.inference_problems`."""
    problems = inference_problems(plan, **more)
    degrees = " ".join(f"{name}={getattr(plan, name)}" for name in _DEGREES if getattr(plan, name) > 1)
    if not problems and plan.gpus != size:
        if size == 1:
            problems.append(
                f"The plan {degrees} takes {plan.gpus} processes, and this is one by itself; start them with "
                f'`penstock launch --procs {plan.gpus} -- generate MODEL --plan "{degrees}" …`, or embed '
                "in place of generate; or leave the plan out."
            )
        else:
            problems.append(
                f"{size} processes were started, but the plan is for {plan.gpus}; use plan.dp={size} to split "
                f"the texts, plan.tp={size} to split layers, or plan.pp={size} for stages."
            )
    if problems:
        raise ConfigError(problems)


@contextmanager
def together(
    plan: Plan, device: torch.device, *, timeout: float = 1800.0, **more: Any
) -> Iterator[ParallelDims]:
    """Inside, this process is one of the ranks that generate as the Plan says: those of the process group that is
    there, or those that `penstock launch` or torchrun started. `timeout` is as of `joined`. Raises ConfigError as
    `require_ranks` does, which gets `more`.
    """
    size = distributed.get_world_size() if distributed.is_initialized() else launched()
    require_ranks(plan, size, **more)
    # Without the settings that only training has rules about.
    with joined(Plan(**{name: getattr(plan, name) for name in _DEGREES}), device, timeout=timeout) as dims:
        yield dims


def from_rank_zero(value: T, dims: ParallelDims) -> T:
    """Rank 0's value, on all ranks."""
    if dims.alone:
        return value
    values = [value]
    distributed.broadcast_object_list(values, src=0)
    return values[0]


def own_texts(count: int, dims: ParallelDims) -> slice:
    """Which of `count` texts are this rank's: a run of as many as others have, or one more or fewer."""
    begin, end = (count * place // dims.data_world for place in (dims.data_rank, dims.data_rank + 1))
    return slice(begin, end)


def from_all_ranks(results: list[T], dims: ParallelDims) -> list[T]:
    """The results of all ranks, in the order of the texts."""
    if dims.data_world == 1:
        return results
    parts: list[list[T]] = [[] for _ in range(dims.data_world)]
    distributed.all_gather_object(parts, results, group=dims.group(*DATA))
    return [one for part in parts for one in part]
