"""Machine files, as `penstock probe` writes them and users edit them, up to a prediction for that machine."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import strategies as st

from fuzz.door import Case, Door
from fuzz.mutate import altered_tree
from fuzz.text import as_json, as_toml
from penstock.config.load import dump_toml, to_dict
from penstock.config.machine import GemmSample, KernelSample, Machine, load_machine, save_machine
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.planner.explain import explain
from penstock.planner.prediction import predict

_CPU = Machine(
    name="a CPU", device="cpu", source="measured", peak_flops={"fp32": 1e11, "bf16": 2e11},
    achievable_flops={"fp32": 8e10}, memory_bytes=16e9, memory_bytes_per_second=2e10, launch_seconds=1e-6,
    operator_seconds=2e-5, page_seconds=1e-7, collective_bytes_per_second=1e9, collective_seconds=1e-4,
    gemm=(GemmSample(dtype="fp32", m=512, n=768, k=768, flops_per_second=7e10),
          GemmSample(dtype="fp32", m=512, n=3072, k=768, flops_per_second=8e10, form="weight")),
    kernels=(KernelSample(name="attention", per_second=4e10, tokens=197, features=64),
             KernelSample(name="gelu", per_second=1e9)),
    notes=("measured for the tests",),
)  # fmt: skip
_PLANS = {
    "cpu": Plan(micro_batch=4),
    "gpu": Plan(
        precision="O2", optimizer="fused", attention="flash", dp=4, tp=2, sharding="fsdp", recompute="full"
    ),
}


def _seeds() -> dict[str, bytes]:
    gpu = load_machine("h100")
    return {
        "cpu.json": json.dumps(to_dict(_CPU)).encode(),
        "cpu.toml": dump_toml(_CPU).encode(),
        "gpu.toml": dump_toml(gpu).encode(),
        "gpu.json": json.dumps(to_dict(gpu)).encode(),
    }


def _enter(name: str, data: bytes) -> None:
    Path(name).write_bytes(data)
    machine = load_machine(name)
    assert load_machine(save_machine(machine, "again.toml")) == machine
    hash(machine)
    plan = _PLANS[name.partition(".")[0]]
    model = PRESETS["vit-b16"] if plan.gpus == 1 else PRESETS["llama3-8b"]
    predict(model, machine, plan)
    explain(model, machine, plan)


def _made() -> st.SearchStrategy[Case]:
    ways = [
        ("cpu.json", _CPU, as_json),
        ("cpu.toml", _CPU, as_toml),
        ("gpu.json", load_machine("h100"), as_json),
    ]
    return st.one_of(
        altered_tree(to_dict(machine)).map(lambda tree, name=name, write=write: (name, write(tree)))
        for name, machine, write in ways
    )


DOOR = Door(
    seeds=_seeds,
    enter=_enter,
    made=_made,
    tokens=(b"[", b"{", b"nan", b"5e-324", b"1e308", b"\\u001b", b"[[gemm]]\n"),
)
