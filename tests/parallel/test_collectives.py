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
from penstock.config.model import DecoderConfig, EncoderConfig, Seq2SeqConfig, ViTConfig
from penstock.config.plan import Plan
from penstock.planner.describe import describe
from penstock.tasks import mean_loss

KINDS = {"all_reduce": "allreduce", "all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter"}
SAMPLES = 2


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


def _counted(name: str, line: str) -> Counter[tuple[str, int]]:
    case = LAYOUT_CASES[name]
    assert case.config is not None
    built = build(case.config, Plan.parse(line), loss=case.loss)
    batch = case.batches(0, SAMPLES)
    with _Counting() as counting:
        mean_loss(case.loss, built.model, batch).backward()  # type: ignore[no-untyped-call]
    return counting.found


EVEN = ("llama", "bert", "bert of classes", "modernbert")
UNEVEN = ("vit of tokens", "t5", "bart")
"""Whose tokens two ranks cannot share out evenly, so that they send rows of zeros besides."""


@pytest.mark.parametrize(
    ("name", "sequence"), [*((name, False) for name in (*EVEN, *UNEVEN)), *((name, True) for name in EVEN)]
)
def test_what_is_sent_is_what_the_planner_lists(name: str, sequence: bool) -> None:
    """In each layer two all-reduces ahead and two behind; or as many pairs of all-gathers and reduce-scatters, and two
    all-gathers more of what the backward pass does not keep. What is sent at both ends besides.
    """
    case: Any = LAYOUT_CASES[name]
    line = f"tp=2 micro_batch={SAMPLES}" + " sp=true" * sequence
    config, batch = case.config, case.batches(0, SAMPLES)
    if not isinstance(config, ViTConfig):
        config = replace(config, sequence=batch[0].shape[1])
    if isinstance(config, Seq2SeqConfig):
        config = replace(config, decoder_sequence=batch[-1].shape[1])
    expected: Counter[tuple[str, int]] = Counter()
    work = describe(config, Plan.parse(line), "cpu")
    for part in work.parts:
        for op in (*part.forward, *part.backward):
            if op.axis == "tensor":
                expected[op.kind, round(op.read)] += part.count
    if isinstance(config, DecoderConfig | EncoderConfig):
        inside = sum(part.count for part in work.blocks) * (10 if sequence else 4)
        assert expected.total() - inside in range(7)
    assert all(found == expected for found in pool(2).run(_counted, name, line)), expected
