"""Ranks that generate together: `tp` splits each layer, `pp` gives each rank some blocks, `dp` splits the texts of a
call, and with `ep` each rank hosts some experts for all texts.

Every rank makes the same calls, with the same prompts and settings, and gets all texts. Ranks that split a model take
the same steps. Their logits are bitwise equal, because sums over ranks, gathered logits and the features of the last
stage are; so each rank chooses tokens by itself, and no token is sent. If texts are drawn without a seed, rank 0 draws
a seed for all.
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
    """Raise ConfigError, with all reasons, unless `size` processes can generate as the Plan says. `more` has arguments
    of `penstock.config.rules.inference_problems`."""
    problems = inference_problems(plan, **more)
    degrees = " ".join(f"{name}={getattr(plan, name)}" for name in _DEGREES if getattr(plan, name) > 1)
    if not problems and plan.gpus != size:
        if size == 1:
            problems.append(
                f"The plan {degrees} takes {plan.gpus} processes, but only one is running; start them with "
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
    """Within this context, this process is one of the ranks that generate as the Plan says: the processes of the
    existing process group, or those that `penstock launch` or torchrun started. `timeout` is an argument of `joined`,
    `more` of `require_ranks`, which raises ConfigError."""
    size = distributed.get_world_size() if distributed.is_initialized() else launched()
    require_ranks(plan, size, **more)
    # Leave out settings that have rules only for training.
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
    """This rank's share of `count` texts: a contiguous run; shares differ by at most one text."""
    begin, end = (count * place // dims.data_world for place in (dims.data_rank, dims.data_rank + 1))
    return slice(begin, end)


def from_all_ranks(results: list[T], dims: ParallelDims) -> list[T]:
    """The results of all ranks, in the order of the texts."""
    if dims.data_world == 1:
        return results
    parts: list[list[T]] = [[] for _ in range(dims.data_world)]
    distributed.all_gather_object(parts, results, group=dims.group(*DATA))
    return [result for part in parts for result in part]
