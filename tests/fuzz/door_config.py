"""What the library reads of settings: files for `--config`, the line of a Plan, machine files, and what processes say.

Files of settings are TOML, YAML and JSON, of every verb that takes one. Plans and machines go as far as what a step
costs and whether it may run. Processes of a run say a rank's report, agents' messages, the lock and the run's records.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.doors import Case, Door
from fuzz.mutate import altered_trees, as_json, as_toml
from penstock.cli.plan_config import PlanConfig
from penstock.cli.scale import ScaleConfig
from penstock.config import rules
from penstock.config.kinds import field_types
from penstock.config.load import dump_toml, load, to_dict
from penstock.config.machine import GemmSample, KernelSample, Machine, load_machine, save_machine
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.config.recipes import load_run
from penstock.config.run import RunConfig
from penstock.errors import EnvironmentProblem
from penstock.ladder.settings import LadderConfig
from penstock.planner.explain import explain
from penstock.planner.prediction import predict

_CONFIGS: dict[str, Any] = {
    "run": load_run(overrides={"model": "vit-digits"}),
    "ladder": LadderConfig(rungs=("fused",), batch=4),
    "plan": PlanConfig(gpus=16),
    "scale": ScaleConfig(batches=2),
}
_YAML = b"""\
model: {preset: vit-s16, image_size: 224}
recipe: &recipe
  lr: 1e-3
  clip_norm: none
  augment: {flip: 0.5}
plan: precision=O1 optimizer=fused
data.source: digits
seed: 1
"""


def _settings() -> dict[str, bytes]:
    return {
        "run.toml": dump_toml(_CONFIGS["run"]).encode(),
        "run.yaml": _YAML,
        **{f"{name}.json": as_json(to_dict(config)) for name, config in _CONFIGS.items()},
        "ladder.toml": b'model = "vit-digits"\nrounds = 3\n[data]\nsource = "digits"\n',
        "plan.yml": b"model: gpt2\ngpus: 8\nmodel.sequence: 2048\n",
    }


def _enter_settings(name: str, data: bytes) -> None:
    Path(name).write_bytes(data)
    stem = name.partition(".")[0]
    if stem == "run":
        run: RunConfig = load_run(file=name)
        Path("again.toml").write_text(dump_toml(run), encoding="utf-8")
        assert load(RunConfig, file="again.toml") == run, "what is stored runs the same again"
        rules.require(run.plan, run.model, run=True)
    else:
        load(type(_CONFIGS[stem]), file=name)


def _made_settings() -> st.SearchStrategy[Case]:
    trees = {name: to_dict(config) for name, config in _CONFIGS.items()}
    ways = [(f"{name}.json", tree, as_json) for name, tree in trees.items()]
    ways += [("run.toml", trees["run"], as_toml), ("ladder.toml", trees["ladder"], as_toml)]
    return altered_trees(*ways, ("run.yaml", trees["run"], as_json))  # nearly all JSON is YAML too


_WORDS = (
    "0", "1", "2", "3", "7", "8", "96", "-1", "0.5", "1.25", "nan", "inf", "1e400", "1e18", "2147483647", "2147483648",
    "9" * 5000, "", "none", "true", "false", "auto", "plain", "O1", "O2", "bf16", "fused", "fsdp", "hsdp",
    "interleaved", "rowwise", "full", "operators", "\x1b[2J", "a\0b", "\u202e",
)  # fmt: skip
_LINES = {
    "vit-b16": b"precision=O1 optimizer=fused micro_batch=32 compile=blocks",
    "llama3-8b": b"precision=O2 dp=8 sharding=fsdp tp=2 sp=true recompute=operators recompute_every=2.5",
    "mixtral-8x7b": b"precision=O2 dp=8 ep=8 sharding=zero1 micro_batch=1",
    "t5-large": b"precision=O2 pp=2 accumulate=4 optimizer=contiguous",
}


def _enter_line(name: str, data: bytes) -> None:
    plan = Plan.parse(data.decode("utf-8", "surrogateescape"))
    assert Plan.parse(plan.line()) == plan
    assert Plan.from_toml(plan.to_toml()) == plan
    model, machine = PRESETS[name], load_machine("h100")
    predict(model, machine, plan)
    rules.problems(plan, model, machine, run=True)


def _made_lines() -> st.SearchStrategy[Case]:
    names = st.sampled_from((*field_types(Plan), "layout", "", "plan", "baseline"))
    words = st.one_of(st.sampled_from(_WORDS), st.integers(1, 64).map(str), st.text(max_size=8))
    lines = st.lists(st.builds("{}={}".format, names, words), max_size=6).map(" ".join)
    return st.tuples(
        st.sampled_from(tuple(_LINES)), lines.map(lambda line: line.encode(errors="surrogatepass"))
    )


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
_MACHINES = {"cpu": _CPU, "gpu": load_machine("h100")}


def _enter_machine(name: str, data: bytes) -> None:
    Path(name).write_bytes(data)
    machine = load_machine(name)
    assert load_machine(save_machine(machine, "again.toml")) == machine
    hash(machine)
    if name.startswith("cpu"):
        model, plan = PRESETS["vit-b16"], Plan(micro_batch=4)
    else:
        sharded = "precision=O2 optimizer=fused attention=flash dp=4 tp=2 sharding=fsdp recompute=full"
        model, plan = PRESETS["llama3-8b"], Plan.parse(sharded)
    predict(model, machine, plan)
    explain(model, machine, plan)


def _said() -> dict[str, Any]:
    from penstock.launch.meeting import Member, Message
    from penstock.launch.report import Failure, Outcome

    member = Member(
        place=None, procs=8, address="10.0.0.1", port=29400, round=0, restarts=1, host="node-1",
        rendezvous="10.0.0.1",
    )  # fmt: skip
    failures = (Failure(3, 1, "Traceback: it failed", False, 12.5), Failure(4, -9, consequence=True))
    return {
        "report": {"text": "RuntimeError: it failed\n", "consequence": False, "hopeless": False, "seconds": 1.7e9},
        "member": asdict(member),
        "message": asdict(Message(node=1, outcome=Outcome(1, failures, final=False))),
        "lock": {"pid": 17, "host": "elsewhere", "since": 1.7e9},
        "records": {"event": "step", "step": 3, "loss": 2.5, "grad_norm": None},
    }  # fmt: skip


def _enter_message(name: str, data: bytes) -> None:
    from penstock.launch.meeting import Member, Message, understood
    from penstock.launch.report import judge, read_report, tell
    from penstock.train.lock import RunLock
    from penstock.train.metrics import Records

    if name == "report":
        Path("report").write_bytes(data)
        if (found := read_report(Path("report"), 0, 1)) is None:
            raise EnvironmentProblem("There is no report that can be read.")
        assert all(character.isprintable() or character in "\n\t" for character in found.text)
    elif name == "member":
        understood(Member, data)
    elif name == "message":
        outcome = understood(Message, data).outcome
        tell(judge(outcome.failures, stopping=False).failures)
    elif name == "lock":
        Path("lock").write_bytes(data)
        lock = RunLock(Path())
        if not lock.hold():
            raise EnvironmentProblem("Another host may hold the lock.")
        lock.__exit__()
    else:
        Path("metrics.jsonl").write_bytes(data + b"\n")
        Records(Path()).rewind(3)


DOORS = {
    "settings": Door(
        seeds=_settings, enter=_enter_settings, made=_made_settings,
        tokens=(b"[", b"{", b"&a ", b"*a", b"<<: *recipe", b"!!int ", b"? ", b"[[a]]\n", b"a.b.c = 1\n", b"nan", b"0x",
                b'"""', b"\x1b[2J", b"\\u0000", b"---\n", b"2001-12-14", b"1:30"),
    ),
    "plan_line": Door(
        seeds=lambda: _LINES, enter=_enter_line, made=_made_lines,
        tokens=tuple(f" {name}=".encode() for name in field_types(Plan)),
    ),
    "machine": Door(
        seeds=lambda: {f"{name}.{ending}": data for name, machine in _MACHINES.items() for ending, data in (
            ("json", as_json(to_dict(machine))), ("toml", dump_toml(machine).encode()))},
        enter=_enter_machine,
        made=lambda: altered_trees(*((f"{name}.json", to_dict(machine)) for name, machine in _MACHINES.items()),
                                   ("cpu.toml", to_dict(_CPU), as_toml)),
        tokens=(b"[", b"{", b"nan", b"5e-324", b"1e308", b"\\u001b", b"[[gemm]]\n"),
    ),
    "messages": Door(
        seeds=lambda: {name: as_json(tree) for name, tree in _said().items() if name != "lock"} | {"lock": b""},
        enter=_enter_message, made=lambda: altered_trees(*_said().items()),
        tokens=(b"[", b"{", b"\\u001b[2J", b"NaN", b"1e400", b'"node": '),
    ),
}  # fmt: skip
