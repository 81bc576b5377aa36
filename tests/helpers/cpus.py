"""Kinds of CPU, for tests that pretend to run on another one. Kernels still run as this machine can."""

from __future__ import annotations

import pytest

from penstock.cpu import Cpu

KINDS = {
    "avx2": Cpu(avx512=False, bf16=False, vnni=False, packs_bf16=False),
    "avx512": Cpu(avx512=True, bf16=False, vnni=True, packs_bf16=True),
    "avx512_bf16": Cpu(avx512=True, bf16=True, vnni=True, packs_bf16=True),
    "unknown": Cpu(avx512=False, bf16=None, vnni=False, packs_bf16=False),
}


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Let the code take this machine's CPU for one of another kind."""
    monkeypatch.setattr("penstock.cpu._CPU", KINDS[kind])
