"""The doctor tries things, and a thing that fails is a finding with a remedy."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
import torch

from penstock import doctor
from penstock.doctor import Finding, examine, healthy, numerics

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def findings() -> list[Finding]:
    return examine()


def _named(findings: list[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name and "cuda" not in finding.area]
    return found


def test_this_machine_is_healthy(findings: list[Finding]) -> None:
    broken = [finding for finding in findings if finding.required and finding.status == "broken"]
    assert broken == []
    assert healthy(findings)


def test_everything_asked_for_is_looked_at(findings: list[Finding]) -> None:
    names = {finding.name for finding in findings}
    assert {
        "python", "torch", "numpy", "torchvision", "cpu", "fp32", "bf16", "fp16", "fp8", "C++ compiler", "triton",
        "shared memory",
    } <= names  # fmt: skip


def test_what_is_broken_has_a_remedy_of_one_line(findings: list[Finding]) -> None:
    for finding in findings:
        assert "\n" not in finding.detail + finding.remedy
        assert finding.detail
        assert finding.remedy or finding.status != "broken"


def test_types_are_measured_beside_fp32(findings: list[Finding]) -> None:
    assert "relative error of a product" in _named(findings, "bf16").detail
    # A neighbour on the same processor can make any type look emulated for a moment.
    assert re.search("× (the speed of|slower than) fp32", _named(findings, "bf16").detail)
    assert "×" not in _named(findings, "fp32").detail


def test_looking_changes_nothing() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    list(numerics.types(CPU))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_wrong_arithmetic_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional,
        "linear",
        lambda a, b: linear(a, b) * (1.0 if a.dtype == torch.half else float("nan")),
    )
    found = {finding.name: finding for finding in numerics.types(CPU)}
    assert found["fp32"].status == "broken"
    assert found["fp32"].required
    assert found["bf16"].status == "broken"
    assert found["fp16"].status in ("ok", "slow")


def test_a_type_without_units_is_slow_and_not_ticked(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((1e-3, 2e-3, 8e-3, 1.9))
    monkeypatch.setattr(numerics, "_fastest", lambda product, device: next(times))
    monkeypatch.setattr(numerics, "_fp8_product", lambda a, b: lambda: torch.nn.functional.linear(a, b))
    found = {finding.name: finding for finding in numerics.types(CPU)}
    assert {name: finding.status for name, finding in found.items()} == {
        "fp32": "ok", "bf16": "ok", "fp16": "slow", "fp8": "slow",
    }  # fmt: skip
    assert "0.5 × the speed of fp32" in found["bf16"].detail
    assert "works, but emulated: 1,900 × slower than fp32" in found["fp8"].detail
    assert healthy(list(found.values()))


def _without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    version = importlib.metadata.version

    def missing(name: str) -> str:
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "numpy", "transformers")
    core = {finding.name: finding for finding in doctor.packages()}
    assert (core["numpy"].status, core["numpy"].remedy) == ("broken", "pip install numpy")
    assert not healthy(list(core.values()))
    extras = {finding.name: finding for finding in doctor.extras()}
    assert extras["transformers"].status == "absent"
    assert extras["transformers"].remedy == "pip install 'penstock[hf]'"
    listed = {extra for _, extra, _ in doctor._OPTIONAL}
    assert {"serve", "export", "lora", "text", "images", "hf"} <= listed


def test_an_old_or_absent_torch_ends_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.4.1+cu121")
        assert examine()[-1].status == "broken"
        assert "upgrade" in examine()[-1].remedy
    monkeypatch.setitem(sys.modules, "torch", None)
    assert examine()[-1].name == "torch"
    assert not healthy(examine())


@pytest.mark.parametrize(
    ("program", "status"), [("", "ok"), ("raise RuntimeError('operator torchvision::nms')", "broken")]
)
def test_torchvision_is_imported_to_see(
    program: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchvision.py").write_text(f"{program}\nclass ops: nms = None\n")
    info = tmp_path / "torchvision-0.99.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.99\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = list(doctor.extras())[-1]
    assert found.status == status
    assert "0.99" in found.detail
    if status == "broken":
        assert "torchvision::nms" in found.detail


def test_the_compiler_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for cxx, status in (
        ("/nowhere/g++", "broken"),
        ("ccache g++", "broken"),
        ("false", "broken"),
        ("true", "ok"),
    ):
        monkeypatch.setenv("CXX", cxx)
        found = doctor.compiler()
        assert (found.status, cxx in found.detail) == (status, True)
        assert ("unset CXX" in found.remedy) == ("g++" in cxx)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.compiler().remedy == "apt-get install g++"
    (tmp_path / "clang++").symlink_to(sys.executable)  # torch takes it only by name
    assert (doctor.compiler().status, doctor.compiler().remedy) == ("absent", "export CXX=clang++")


def _devices_with(monkeypatch: pytest.MonkeyPatch, present: bool, cuda: str | None) -> Finding:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/bin/nvidia-smi" if present else None)
    return list(doctor.devices())[-1]


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU here")
def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _devices_with(monkeypatch, present=False, cuda=None).status == "absent"
    assert "built for CPUs" in _devices_with(monkeypatch, present=True, cuda=None).detail
    assert "cannot start it" in _devices_with(monkeypatch, present=True, cuda="12.8").detail


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        total = 64e6

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage)
    assert doctor.shared_memory().status == "broken"
    assert "--shm-size" in doctor.shared_memory().remedy
