"""Fused operators in the planner's list: fewer bytes, the same parameters and products."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.fused import FUSED
from penstock.config.gains import store
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.planner.describe import describe
from penstock.planner.operators import Op, Workload


def _listed(name: str, line: str, device: str = "cpu", kind: str = "") -> Workload:
    return describe(PRESETS[name], Plan.parse(f"micro_batch=4 {line}"), device, kind=kind)


def _moved(work: Workload, part: str) -> float:
    return sum(count * (op.read + op.written) for count, op in work.operators() if part in op.name)


@pytest.mark.parametrize("name", ["vit-s16", "gpt-tiny", "bert-tiny", "llama-tiny", "marian-tiny"])
def test_fused_operators_move_less_and_learn_the_same(name: str) -> None:
    for types in ("", "precision=O1", "precision=O2"):
        plain = _listed(name, types)
        for word in (*FUSED, ",".join(FUSED), "auto"):
            fused = _listed(name, f"{types} fuse={word}", kind="avx512_bf16")
            assert (fused.parameters, fused.tensors) == (plain.parameters, plain.tensors)
            assert fused.model_flops == plain.model_flops
            assert _moved(fused, "") <= _moved(plain, "")
            weights = [
                sum(c * op.weights for c, op in work.operators() if not op.forward) for work in (fused, plain)
            ]
            assert weights[0] == weights[1]
        assert _moved(_listed(name, f"{types} fuse=residual_norm"), "") < _moved(plain, "")
    on_gpu = [_listed(name, line, "cuda") for line in ("", "fuse=residual_norm")]
    assert _moved(on_gpu[0], "") > _moved(on_gpu[1], "")
    assert not [op for _, op in on_gpu[1].operators() if "norm.mask" in op.name], "drawn again"


def test_auto_counts_what_was_measured_to_pay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By kind of machine, variant, type of products, and what is compiled; a user's own table goes first."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    every = f"fuse={','.join(FUSED)}"
    cases = [  # BERT has LayerNorm and GELU, Llama RMSNorm and SwiGLU
        ("bert-tiny", "", "fuse=bias_activation"),
        ("bert-tiny", "compile=blocks", every),
        ("bert-tiny", "precision=O2", "fuse=residual_norm"),
        ("bert-tiny", "precision=O1 compile=whole", "fuse=bias_activation"),
        ("llama-tiny", "precision=O1", every),
    ]

    def listed(name: str, line: str, kind: str = "") -> list[tuple[float, Op]]:
        return list(_listed(name, line, kind=kind).operators())

    for name, line, same in cases:
        auto = listed(name, f"{line} fuse=auto", "avx512_bf16")
        assert auto == listed(name, f"{line} {same}") != listed(name, line)
        for unknown in ("", "avx2"):
            assert listed(name, f"{line} fuse=auto", unknown) == listed(name, line)
    for gain, same in ((1.5, "fuse=bias_activation"), (1.0299, "")):
        store("avx2", {"bias_activation": {"swiglu": {"float32": {"eager": gain, "compiled": 2.0}}}})
        assert listed("llama-tiny", "fuse=auto", "avx2") == listed("llama-tiny", same)


def test_bytes_of_a_fused_norm_are_those_of_its_kernel() -> None:
    """BERT in fp32 without dropout in question: x, branch and mask in, sum and norm out; back, three in and two out."""
    model = PRESETS["bert-tiny"]
    size = 4 * model.sequence * model.width
    work = _listed("bert-tiny", "fuse=residual_norm,bias_activation")
    (block,) = work.blocks
    ahead = [op for op in block.forward if op.kind == "norm"]
    back = [op for op in block.backward if op.kind == "norm"]
    assert len(ahead) == len(back) == 2
    assert {(op.read, op.written) for op in ahead} == {(9 * size, 8 * size)}
    assert {(op.read, op.written) for op in back} == {(9 * size, 8 * size)}
    assert not [op for op in block.backward if op.name == "mlp.up.bias" and op.read]
