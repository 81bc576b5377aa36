"""The time of a step by kinds of work, compared with the minimum that a perfect program would need.

The times are from a trace: each operator counts with the time in which it called no other operator. A GPU's kernels
count in the row of the operator that launched them. Kernels called without torch's dispatcher, such as those in C++,
count by the autograd Function that calls them, which torch records under the name of its class.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.planner.ideal import ALONE, BETWEEN, OTHER, Least

STEP = "penstock.step"
"""Name of the marker around each step in the trace."""
HOST = "Python, autograd and launching"
ALLOCATION = "allocation and clearing"
COLLECTIVES = "collectives"
_COMPILED = "## Call CompiledFxGraph"
_BACKWARD = ("autograd::engine::evaluate_function", "CompiledFunctionBackward")
_INSIDE = (
    ("Optimizer.step", "optimizer"), ("aten::cross_entropy_loss", "loss"), ("LogSoftmaxBackward", "loss"),
    ("NllLoss", "loss"), ("aten::embedding", "embedding"), ("EmbeddingBackward", "embedding"),
    ("aten::dropout", "dropout"), ("aten::scaled_dot_product_attention", "attention"),
    ("ScaledDotProduct", "attention"),
)  # fmt: skip
"""Parts of operators' names, and the row in which everything that they call is counted."""
_COMPUTING = (
    (("DirectAttention", "penstock::attend"), "attention"),
    (("_CrossEntropyInPlace", "_SplitCrossEntropy", "_ContrastLoss", "_SampleLosses", "penstock::cross_entropy",
      "penstock::linear_cross_entropy", "penstock::logit_rows_"), "loss"),
    (("_DirectNorm", "penstock::add_norm"), "norms"),
    (("_DirectActivation", "penstock::bias_activation"), "activations"),
    (("penstock::kept",), "dropout"),
)  # fmt: skip
"""Prefixes of names of Penstock's own operators and autograd Functions, and the row of them and their calls."""
_OWN = (
    (("c10d::", "gloo:", "nccl:"), COLLECTIVES),
    ((_COMPILED, "triton_"), BETWEEN),
    (("aten::_scaled_dot_product", "aten::_flash", "aten::_efficient", "aten::bmm", "aten::baddbmm"), "attention"),
    (("aten::mm", "aten::addmm", "aten::linear", "aten::_int_mm", "aten::_scaled_mm", "aten::_grouped_mm",
      "_Grouped", "_Probed", "penstock::native_grouped", "penstock::probed", "penstock::grouped", "penstock::packed",
      "penstock::separate", "aten::convolution", "aten::_convolution", "aten::mkldnn", "aten::thnn_conv", "mkldnn::",
      "onednn::"),
     "products"),
    (("aten::log_softmax", "aten::_log_softmax", "aten::nll_loss"), "loss"),
    (("aten::softmax", "aten::_softmax"), "attention"),
    (("aten::native_layer_norm", "aten::_fused_rms_norm", "aten::rms_norm"), "norms"),
    (("aten::gelu", "aten::silu", "aten::relu", "aten::threshold_backward", "aten::tanh"), "activations"),
    (("aten::native_dropout", "aten::bernoulli"), "dropout"),
    (("aten::_foreach", "aten::linalg_vector_norm", "aten::_amp_", "aten::_fused_adam", "penstock::adamw"),
     "optimizer"),
    (("aten::empty", "aten::zero", "aten::fill_", "aten::resize_", "aten::new_"), ALLOCATION),
    (("aten::as_strided", "aten::t$", "aten::transpose", "aten::view", "aten::_unsafe_view", "aten::expand",
      "aten::reshape", "aten::select", "aten::slice", "aten::unsqueeze", "aten::squeeze", "aten::detach",
      "aten::permute", "aten::alias", "aten::item", "aten::_local_scalar", "aten::lift", "aten::result_type"), HOST),
)  # fmt: skip
"""Prefixes of operators' names, where $ is the end of a name, and the row of their own time."""


def step_table(trace: Path, least: Mapping[str, Least]) -> list[dict[str, Any]]:
    """The rows of a trace with `STEP` around each step, the longest first; empty if the trace has none. A row has a
    `name`, `milliseconds` per step and their `share` of it, in [0, 1]; `least_milliseconds` of a perfect program, None
    if it would need no such work; and the model's `gigaflops` and `gigabytes` in one step."""
    events = [
        event
        for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation", "kernel")
    ]
    steps, seconds = measure_rows(events)
    if not steps:
        return []
    total = sum(seconds.values())
    rows = list[dict[str, Any]]()
    for name in {*seconds, *least}:
        took, bound = seconds.get(name, 0.0), least.get(name)
        flops, moved = (0.0, 0.0) if bound is None else bound[:2]
        rows.append({
            "name": name, "milliseconds": 1e3 * took, "share": took / total,
            "least_milliseconds": None if bound is None else 1e3 * bound.seconds, "gigaflops": flops / 1e9,
            "gigabytes": moved / 1e9,
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["milliseconds"])


def measure_rows(events: Iterable[Mapping[str, Any]]) -> tuple[int, dict[str, float]]:
    """The number of steps, and the seconds of one step by row."""
    host = sorted((e for e in events if e["cat"] != "kernel"), key=lambda e: (e["tid"], e["ts"], -e["dur"]))
    marks = [event for event in host if event["name"] == STEP]
    kernels = [event for event in events if event["cat"] == "kernel"]
    microseconds_of: defaultdict[str, float] = defaultdict(float)
    rows_of: dict[Any, str] = {}
    for event, row, own_time in _own_times(host):
        rows_of[event.get("args", {}).get("External id")] = row
        if _within(event, marks):
            microseconds_of[row] += own_time
    if kernels:  # the host runs ahead of the device, so only the device's time counts
        microseconds_of = defaultdict(float)
        for kernel in kernels:
            microseconds_of[rows_of.get(kernel.get("args", {}).get("External id"), OTHER)] += kernel["dur"]
        microseconds_of[HOST] = max(0.0, sum(mark["dur"] for mark in marks) - sum(microseconds_of.values()))
    count = len(marks)
    return count, {row: micros / 1e6 / count for row, micros in microseconds_of.items() if micros}


def _within(event: Mapping[str, Any], marks: list[Mapping[str, Any]]) -> bool:
    number = bisect_right(marks, event["ts"], key=lambda mark: mark["ts"]) - 1
    return number >= 0 and event["ts"] < marks[number]["ts"] + marks[number]["dur"]


def _own_times(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str, float]]:
    """Each event of several threads with its row, and the microseconds it spent outside of events within it."""
    # Event, row, own time, row of everything it calls, whether backward, whether in compiled code.
    stack: list[list[Any]] = []
    thread: Any = None

    def ended(before: float) -> Iterator[tuple[Mapping[str, Any], str, float]]:
        while stack and stack[-1][0]["ts"] + stack[-1][0]["dur"] <= before:
            event, row, own_time, *_ = stack.pop()
            yield event, row, max(0.0, own_time)

    for event in events:
        if event["tid"] != thread:
            yield from ended(float("inf"))
            thread = event["tid"]
        yield from ended(event["ts"])
        inside, backward, compiled = stack[-1][3:] if stack else ("", False, False)
        if stack:
            stack[-1][2] -= event["dur"]
        name = event["name"]
        backward = backward or name.startswith(_BACKWARD)
        compiled = compiled or name.startswith(_COMPILED)
        computes = _first(_COMPUTING, name)
        inside = inside or computes or next((row for start, row in _INSIDE if start in name), "")
        row = _row(name, computes, inside, backward=backward, compiled=compiled)
        stack.append([event, row, event["dur"], inside, backward, compiled])
    yield from ended(float("inf"))


def _row(name: str, computes: str, inside: str, *, backward: bool, compiled: bool) -> str:
    kind = computes or _first(_OWN, name)
    if not kind:
        kind = OTHER if name.startswith(("aten::", "penstock::")) else HOST
    # A loss that includes the product with the head's weights computes a product of the model.
    if inside and kind not in (HOST, COLLECTIVES) and (inside, kind) != ("loss", "products"):
        kind = inside
    if compiled and kind in (*ALONE.values(), OTHER):
        kind = BETWEEN
    directed = kind in ("products", "attention", BETWEEN)
    return f"{kind}, {'backward' if backward else 'forward'}" if directed else kind


def _first(table: Iterable[tuple[tuple[str, ...], str]], name: str) -> str:
    """The row of the first entry with a prefix of this name; "" if there is none."""
    return next((row for starts, row in table if f"{name}$".startswith(starts)), "")


def as_text(rows: list[dict[str, Any]]) -> str:
    """The table in plain text."""
    wide = max(len(row["name"]) for row in rows)
    lines = [f"{'part of a step':<{wide}}  {'ms':>9}  {'share':>6}  {'least ms':>9}  {'times':>6}"]
    for row in rows:
        least = row["least_milliseconds"]
        lines.append(
            f"{row['name']:<{wide}}  {row['milliseconds']:>9,.2f}  {row['share']:>6.1%}"
            + (f"  {least:>9,.2f}" if least is not None else f"  {'–':>9}")
            + (f"  {row['milliseconds'] / least:>6.1f}" if least else "")
        )
    total = sum(row["milliseconds"] for row in rows)
    least = sum(row["least_milliseconds"] or 0.0 for row in rows)
    lines.append(f"{'whole step':<{wide}}  {total:>9,.2f}  {1:>6.1%}  {least:>9,.2f}  {total / least:>6.1f}")
    return "\n".join(lines) + "\n"
