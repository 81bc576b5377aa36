"""Machines are shipped as datasheets, stored by probes, and found again."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.machine import (
    ASSUMED_LAUNCH_SECONDS,
    GemmSample,
    KernelSample,
    Machine,
    cache_folder,
    cache_path,
    cached_machine,
    known_machines,
    load_machine,
    match_datasheet,
    save_machine,
)
from penstock.errors import ConfigError, EnvironmentProblem

MEASURED = Machine(
    name="AMD EPYC AVX2, 2 threads", device="cpu", source="measured", peak_flops={"fp32": 1.5e11},
    gemm=(GemmSample(dtype="fp32", m=1, n=2, k=3, flops_per_second=1e9),), notes=("torch 2.13.0",),
)  # fmt: skip


def test_the_shipped_machines() -> None:
    assert known_machines() == (
        "v100", "a100-40g", "a100-80g", "h100", "h200", "b200", "gb200", "b300", "h800", "mi300x", "mi325x", "mi355x",
        "h20", "l40s", "l4", "a10", "t4", "rtx-3090", "rtx-4090", "rtx-5090", "tpu-v5p", "tpu-v6e", "trainium2",
    )  # fmt: skip
    for name in known_machines():
        machine = load_machine(name)
        device = "other" if name.startswith(("tpu", "trainium")) else "cuda"
        assert (machine.name, machine.device, machine.source) == (name, device, "datasheet")
        assert machine.launch_seconds == ASSUMED_LAUNCH_SECONDS
        for kind, rate in machine.achievable_flops.items():
            assert 0.5 < rate / machine.peak_flops[kind] < 1, "a sweep reached half the peak or more"
        assert (
            machine.peak_flops.get("fp32", 0.0) < machine.peak_flops["bf16" if device == "other" else "fp16"]
        )
    for name in known_machines()[known_machines().index("b200") :]:
        assert any(word in " ".join(load_machine(name).notes) for word in ("unverified", "guess")), name
    for name in ("gb200", "b300", "h800", "mi355x", "tpu-v5p", "tpu-v6e", "trainium2"):
        assert re.search(r"Sources?: ", " ".join(load_machine(name).notes)), name
    assert load_machine("H100") is load_machine("h100")
    for name in ("4090", "RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090"):
        assert load_machine(name) is load_machine("rtx-4090")


def test_types_that_a_chip_lacks_are_absent() -> None:
    assert "bf16" not in load_machine("v100").peak_flops
    assert "tf32" not in load_machine("v100").peak_flops
    assert "fp8" not in load_machine("a100-80g").peak_flops


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_storing_gives_the_same_machine_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "deep" / f"m{suffix}"
    for machine in (MEASURED, load_machine("mi300x")):
        assert load_machine(save_machine(machine, path)) == machine
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_unknown_machines_are_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no machine 'a100-80'\. Did you mean 'a100-80g'"):
        load_machine("a100-80")
    with pytest.raises(ConfigError, match=r"Did you mean 'a100-40g' or 'a100-80g'"):
        load_machine("a100")
    with pytest.raises(ConfigError, match=r"no machine 'h10'\. Did you mean 'h100'\?"):
        load_machine("h10")
    for stranger in ("4080", "gtx-1080", "w7900", "tpu-v5e", "9"):
        with pytest.raises(ConfigError, match=rf"no machine '{stranger}'\. Give one of"):
            load_machine(stranger)
    with pytest.raises(ConfigError, match=r"machine file nowhere\.toml cannot be read: it does not exist"):
        load_machine("nowhere.toml")


def test_bad_machine_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text('name = "x"\ndevice = "tpu"\npeak_flop = 3\n')
    with pytest.raises(ConfigError) as caught:
        load_machine(path)
    told = str(caught.value)
    assert "Did you mean 'peak_flops'?" in told
    assert "device is 'tpu', but must be 'cuda', 'cpu' or 'other'" in told
    assert str(path) in told
    with pytest.raises(ConfigError, match="must end in one of them"):
        save_machine(MEASURED, tmp_path / "m.txt")
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        save_machine(MEASURED, tmp_path / "file" / "m.toml")


def test_the_cache_finds_by_name_and_by_age() -> None:
    assert cached_machine() is None
    assert cached_machine(MEASURED.name) is None
    save_machine(MEASURED, cache_path(MEASURED.name))
    newer = replace(MEASURED, name="other")
    os.utime(cache_path(MEASURED.name), (1, 1))
    save_machine(newer, cache_path("other"))
    assert cached_machine() == newer
    assert cached_machine(MEASURED.name) == MEASURED
    assert cached_machine("third") is None


def test_a_broken_cache_is_no_cache() -> None:
    path = cache_path(MEASURED.name)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert cached_machine(MEASURED.name) is None
    assert cached_machine() is None


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "a"))
    assert cache_folder() == tmp_path / "a"
    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_folder() == tmp_path / "b" / "penstock"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "penstock"


@pytest.mark.parametrize(
    ("device", "memory", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 42.4e9, "a100-40g"), ("NVIDIA A100-SXM4-80GB", 85.1e9, "a100-80g"),
        ("NVIDIA H100 80GB HBM3", 85.0e9, "h100"), ("NVIDIA H200", 150.1e9, "h200"),
        ("Tesla V100-SXM2-16GB", 16.9e9, "v100"), ("AMD Instinct MI300X OAM", 206e9, "mi300x"),
        ("NVIDIA B200", 191e9, "b200"), ("NVIDIA GB200", 191e9, "gb200"),
        ("NVIDIA GeForce RTX 3090", 25e9, "rtx-3090"), ("NVIDIA GeForce RTX 4090 Laptop GPU", 17e9, None),
        ("NVIDIA GeForce RTX 3060", 12e9, None), ("Tesla T4", 15.8e9, "t4"), ("NVIDIA L4", 24e9, "l4"),
        ("NVIDIA L40S", 48e9, "l40s"), ("NVIDIA A10G", 24e9, None), ("NVIDIA H20", 102e9, "h20"),
    ],
)  # fmt: skip
def test_devices_are_known_by_their_names(device: str, memory: float, name: str | None) -> None:
    found = match_datasheet(device, memory)
    assert (found.name if found else None) == name
    if found:
        assert device in found.notes[-1]


def test_machines_hold_their_types() -> None:
    with pytest.raises(ConfigError, match="devices_per_node is 0"):
        replace(MEASURED, devices_per_node=0)
    with pytest.raises(ConfigError, match=r"machine.device is 'tpu'"):
        replace(MEASURED, device="tpu")  # type: ignore[arg-type]
    assert len({MEASURED, MEASURED, load_machine("h100")}) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_flops": {}}, "machine.peak_flops is empty"),
        ({"peak_flops": {"fp32": 0.0}}, "machine.peak_flops.fp32 is 0.0, but must be above 0."),
        ({"peak_flops": {"fp32": math.inf}}, "machine.peak_flops.fp32 is inf"),
        ({"achievable_flops": {"bf16": -1.0}}, "machine.achievable_flops.bf16 is -1.0"),
        ({"memory_bytes": -1.0}, "machine.memory_bytes is -1.0, but must be at least 0."),
        ({"memory_bytes_per_second": math.nan}, "machine.memory_bytes_per_second is nan"),
        ({"launch_seconds": -1e-6}, "machine.launch_seconds is -1e-06"),
        ({"operator_seconds": math.inf}, "machine.operator_seconds is inf"),
        ({"page_seconds": -1.0}, "machine.page_seconds is -1.0"),
        ({"link_bytes_per_second": -1.0}, "machine.link_bytes_per_second is -1.0"),
        ({"node_bytes_per_second": math.nan}, "machine.node_bytes_per_second is nan"),
        ({"collective_bytes_per_second": -1.0}, "machine.collective_bytes_per_second is -1.0"),
        ({"multiprocessors": -1}, "machine.multiprocessors is -1"),
        ({"devices_per_node": -1}, "machine.devices_per_node is -1, but must be at least 1."),
        ({"power_watts": -700.0}, "machine.power_watts is -700.0"),
        (
            {"gemm": (replace(MEASURED.gemm[0], flops_per_second=0.0),)},
            "machine.gemm[0].flops_per_second is 0.0",
        ),
        (
            {"gemm": (*MEASURED.gemm, replace(MEASURED.gemm[0], n=0))},
            "machine.gemm[1].n is 0, but must be at least 1",
        ),
        (
            {"kernels": (KernelSample(name="gelu", per_second=math.nan),)},
            "machine.kernels[0].per_second is nan",
        ),
        (
            {"kernels": (KernelSample(name="bmm", per_second=1.0, tokens=-1),)},
            "machine.kernels[0].tokens is -1",
        ),
    ],
)
def test_figures_that_cannot_be_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(MEASURED, **changes)
    assert len(caught.value.problems) == 1
    assert message in str(caught.value)


def test_0_is_a_figure_that_is_not_known() -> None:
    unknown: dict[str, Any] = {
        "memory_bytes": 0.0, "memory_bytes_per_second": 0.0, "launch_seconds": 0.0, "power_watts": 0.0,
        "link_bytes_per_second": 0.0, "multiprocessors": 0,
    }  # fmt: skip
    replace(MEASURED, **unknown)


def test_figures_that_cannot_be_are_refused_with_their_file(tmp_path: Path) -> None:
    path = save_machine(MEASURED, tmp_path / "m.json")
    path.write_text(path.read_text().replace("1000000000.0", "-Infinity").replace("150000000000.0", "NaN"))
    with pytest.raises(ConfigError) as caught:
        load_machine(path)
    assert str(caught.value) == (
        f"The machine file {path} is refused: peak_flops.fp32 is nan, but must be a finite number."
    )
