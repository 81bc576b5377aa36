"""What a CPU can do, as its flags and the environment's limits say."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cpu import _multiplies_bf16


@pytest.mark.parametrize(
    ("has", "limit", "expected"),
    [
        ({"avx2": True, "avx512_bf16": True}, "", True),
        ({"avx2": True, "amx_bf16": True}, "ALL", True),
        ({"avx2": True, "avx512_bf16": True}, "AVX512_CORE_AMX", True),
        ({"avx2": True, "avx512_bf16": True}, "avx512_core", False),
        ({"avx2": True, "amx_bf16": True}, "AVX2", False),
        ({"neon": True, "bf16": True}, "", True),
        ({"avx2": True, "avx512_bf16": False}, "", False),
        ({}, "", None),
    ],
)
def test_units_for_bf16(
    has: dict[str, Any], limit: str, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert _multiplies_bf16(has) is expected
