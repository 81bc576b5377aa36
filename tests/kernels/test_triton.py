"""Triton's kernels: each against its reference in the interpreter, with mutants that fail, and compiled for GPUs.

A kernel is enrolled in `CASES` by what is compiled of it; `check` and MUTANTS are in its own test file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers.modules import loaded
from helpers.sweeps import sweep
from helpers.triton_kernels import compile_for, interpret, needs_triton
from penstock.kernels.residual_norm import MOST

pytestmark = needs_triton


class Compiled(NamedTuple):
    """A kernel with what `compile_for` takes, and what its program must hold."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
    none_of: str = r"st[.]global\S*[.]b16"
    """Stores of a number at a time, or what else a program must be without."""
    wide: tuple[int, int] | None = None
    """Loads and stores of 16 bytes in each thread."""


def _logit_rows() -> Iterator[Compiled]:
    from penstock.kernels.triton import logit_rows as module

    types = {"logits": "*bf16", "taught": "*bf16", "targets": "*i64"}
    types |= dict.fromkeys(("row_weights", "losses", "sums"), "*fp32")
    types |= dict.fromkeys(("stride", "taught_stride", "columns"), "i32")
    types |= dict.fromkeys(("smoothing", "z_loss", "share", "temperature", "scale"), "fp32")
    for taught in (False, True):
        constants = {"SMOOTHS": True, "TAUGHT": taught, "WEIGHED": True, "WRITES": True}
        constants["BLOCK"] = module.BLOCK // (2 if taught else 1)
        options = {"aligned": ["stride", "taught_stride", "columns"], "num_warps": module.WARPS}
        # The logit of the target is read by itself.
        yield Compiled(module.logit_rows_kernel, types, constants, options | {"single": 2}, none_of="")


def _seeded_norm() -> Iterator[Compiled]:
    from penstock.kernels.triton import seeded_norm as module
    from penstock.kernels.triton.common import tile_of

    halves = (
        "x", "residual", "normed", "total", "to_normed", "to_total", "to_x", "to_residual", "weight", "bias",
    )  # fmt: skip
    types = dict.fromkeys(halves, "*bf16") | {"seed": "*i64"}
    types |= dict.fromkeys(("means", "inverses", "to_weight", "to_bias"), "*fp32")
    types |= {"rows": "i32", "columns": "i32", "level": "i32", "scale": "fp32", "eps": "fp32"}
    for columns in (768, MOST):
        rows, block, warps = tile_of(columns)
        constants = dict.fromkeys(("DROPS", "CENTRED", "HAS_WEIGHT", "HAS_BIAS"), True)
        constants |= {"ROWS": rows, "BLOCK": block}
        options = {"aligned": ["columns"], "num_warps": warps}
        yield Compiled(module.seeded_norm_kernel, types, constants, options)
        back = constants | {"HAS_TOTAL": True, "HAS_X": True}
        yield Compiled(module.seeded_norm_backward_kernel, types, back, options)


def _adamw() -> Iterator[Compiled]:
    from penstock.kernels.triton import adamw as module

    kernel = module.adamw_kernel
    types = dict.fromkeys(kernel.arg_names, "fp32") | {"table": "*i64", "gradients": "*i64", "blocks": "*i32"}
    types |= {"grad_scale": "*fp32", "found_inf": "*fp32"}
    flags = {"HAS_SCALE": True, "HAS_FOUND": True, "MAXIMIZE": False, "BLOCK": module.BLOCK}
    for gradient, copy, averages, wide in (  # of 16 elements in each thread
        ("bf16", "none", False, (14, 12)),
        ("bf16", "none", True, (18, 16)),
        ("fp32", "bf16", True, (20, 18)),
        ("fp16", "none", False, None),  # tensors that begin anywhere
    ):
        constants = flags | {
            "GRADIENT": gradient, "COPY": copy, "AVERAGES": averages, "ALIGNED": wide is not None,
        }  # fmt: skip
        options = {"num_warps": module.WARPS, "single": 0 if wide else None, "enable_fp_fusion": False}
        # Every operation is rounded by itself.
        contracted = r"fma[.]rn[.]f32|div[.]full|approx[.]f"
        none_of = rf"{contracted}|st[.]global\S*[.]b16" if wide else contracted
        yield Compiled(kernel, types, constants, options, none_of, wide)


def _beam_step() -> Iterator[Compiled]:
    from penstock.kernels.triton import beam_step as module
    from penstock.kernels.triton.common import power_above

    floats = "logits", "largest", "sums", "values", "scores", "done_scores", "new_scores", "new_done_scores"
    types = dict.fromkeys(floats, "*fp32") | {"tokens": "*i32", "divisor": "fp32", "ahead": "fp32"}
    types |= dict.fromkeys(("done", "parents", "chosen", "stops", "new_done"), "*i64")
    types |= dict.fromkeys(("finished", "hopeful", "new_finished", "new_hopeful"), "*i8")
    types |= dict.fromkeys(("size", "step", "last", "parts", "each"), "i32")
    options = {"single": None, "num_warps": 8}  # rows of logits begin anywhere
    for beams, kept, words in ((4, 8, 58_101), (16, 32, 151_936)):
        parts = -(-words // module.SPAN)
        terms = {"BEAMS": beams, "KEPT": kept, "ENDS": 1, "NORMED": False, "FULL": True}
        widths = {"BEAMS": beams, "PARTS": parts, "KEPT": kept, "EACH": parts * kept}
        terms |= {f"{name}_WIDE": power_above(size) for name, size in widths.items()}
        first = {"SPAN": module.SPAN, "KEPT": kept}
        yield Compiled(module.candidates_kernel, types, first, options, none_of="")
        yield Compiled(module.merge_kernel, types, terms, options, none_of="")


CASES: dict[str, Callable[[], Iterator[Compiled]]] = {
    "logit_rows": _logit_rows, "seeded_norm": _seeded_norm, "adamw": _adamw, "beam_step": _beam_step,
}  # fmt: skip


def _file(name: str) -> Path:
    return Path(__file__).with_name(f"test_{name}.py")


@pytest.mark.slow
@pytest.mark.parametrize("sixth", sweep(range(6), [0]))
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_equals_its_reference_in_the_interpreter_and_mutants_do_not(name: str, sixth: int) -> None:
    interpret(_file(name), sixth)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_equals_its_reference_on_a_gpu(name: str) -> None:
    loaded(_file(name)).check("cuda")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sweep([80, 90, 100], [90]))
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_compiles_without_spilling_and_reads_in_vectors(
    name: str, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for case in CASES[name]():
        count = compile_for(architecture, case.kernel, case.types, case.constants, **case.options)
        assert not case.none_of or count(case.none_of) == 0
        if case.wide is not None:
            # What an architecture reads 32 bytes at a time counts as two.
            wide = [count(rf"{how}[.]global\S*[.]v4[.]b32") for how in ("ld", "st")]
            wider = [count(rf"{how}[.]global\S*[.](v8[.]b32|v4[.]b64)") for how in ("ld", "st")]
            assert (wide[0] + 2 * wider[0], wide[1] + 2 * wider[1]) == case.wide
