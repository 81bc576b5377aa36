"""What split layers send: every call and byte of a forward and a backward pass, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.layouts import LAYOUT_CASES
from helpers.rank_pool import pool
from penstock.build import build
from penstock.config.model import DecoderConfig
from penstock.config.plan import Plan
from penstock.planner.describe import describe

pytestmark = pytest.mark.alone

KINDS = {"all_reduce": "allreduce", "all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter"}
SAMPLES, WIDE = 2, 4


class _Counting(TorchDispatchMode):
    """Counts collectives by kind and bytes: of the whole that is added up, gathered or shared out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = KINDS.get(func.overloadpacket.__name__)
        if kind is not None and func.namespace == "_c10d_functional":
            whole = out if kind == "gather" else args[0]
            self.found[kind, whole.numel() * whole.element_size()] += 1
        return out


def _counted(line: str) -> Counter[tuple[str, int]]:
    case = LAYOUT_CASES["llama"]
    assert case.config is not None
    built = build(case.config, Plan.parse(line), loss=case.loss)
    batch = case.batches(0, SAMPLES)
    with _Counting() as counting:
        case.loss(built.model, batch).backward()  # type: ignore[no-untyped-call]
    return counting.found


@pytest.mark.parametrize("sequence", [False, True])
def test_each_layer_sends_what_the_planner_lists(sequence: bool) -> None:
    """Two all-reduces ahead and two behind per layer; or as many pairs of all-gathers and reduce-scatters."""
    line = f"tp=2 micro_batch={SAMPLES}" + " sp=true" * sequence
    config: Any = LAYOUT_CASES["llama"].config
    assert isinstance(config, DecoderConfig)
    tokens = LAYOUT_CASES["llama"].batches(0, SAMPLES)[0].shape[1]
    rows, width = SAMPLES * tokens, config.width
    whole = rows * width * WIDE
    expected: Counter[tuple[str, int]] = Counter()
    work = describe(replace(config, sequence=tokens), Plan.parse(line), "cpu")
    for part in work.blocks:
        for op in (*part.forward, *part.backward):
            # What is kept of gathered rows here is all of them, so that they are not gathered again.
            if op.axis == "tensor" and not (op.kind == "gather" and not op.forward and op.hides):
                expected[op.kind, round(op.read)] += part.count
    assert expected.total() == 4 * config.depth * (2 if sequence else 1)
    # The table of tokens; gradients of what enters the output, or tokens that part and come together at both ends; and
    # of the loss the largest logit and two sums of each row.
    expected["allreduce", whole] += 1
    expected += Counter({("allreduce", rows * WIDE): 1, ("allreduce", 2 * rows * WIDE): 1})
    if sequence:
        expected += Counter({("gather", whole): 2, ("scatter", whole): 1})
    else:
        expected["allreduce", whole] += 1
    assert all(found == expected for found in pool(2).run(_counted, line)), expected
