"""A Plan is one line of text, and knows what it cannot be."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated, Any, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.kinds import field_types, is_union
from penstock.config.load import load
from penstock.config.machine import Machine, load_machine
from penstock.config.model import PRESETS
from penstock.config.plan import BASELINE, Plan
from penstock.config.rules import require
from penstock.errors import ConfigError

CPU = Machine(
    name="a cpu", device="cpu", source="measured", peak_flops={"fp32": 1e11, "bf16": 2e11, "fp16": 1e9}
)
MODEL = PRESETS["vit-s16"]


def _values(kind: Any) -> st.SearchStrategy[Any]:
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    elif is_union(kind):
        return st.one_of(*(_values(arm) for arm in get_args(kind)))
    elif get_origin(kind) is tuple:
        return st.lists(_values(get_args(kind)[0]), max_size=3).map(tuple)
    elif get_origin(kind) is not None:
        return st.sampled_from(get_args(kind))
    return {int: st.integers(1, 10**6), float: st.floats(1, 10**4), bool: st.booleans()}[kind]


@st.composite
def _plans(draw: st.DrawFn) -> Plan:
    """Any Plan that can be made, of whatever fields a Plan has."""
    return Plan(**{name: draw(_values(kind)) for name, kind in field_types(Plan).items()})


@given(plan=_plans(), order=st.randoms(use_true_random=False))
def test_line_and_toml_round_trips(plan: Plan, order: Any) -> None:
    line = str(plan)
    assert "\n" not in line
    assert Plan.parse(line) == plan
    assert Plan.parse(line).line() == line
    words = line.split()
    order.shuffle(words)
    assert Plan.parse("  ".join(words)) == plan
    assert Plan.from_toml(plan.to_toml()) == plan
    assert load(Plan, overrides=dict(word.split("=") for word in words if word != BASELINE)) == plan


def test_defaults_print_as_baseline() -> None:
    assert str(Plan()) == "baseline"
    assert Plan.parse("baseline") == Plan.parse("") == Plan()
    assert Plan.parse("baseline optimizer=fused") == Plan(optimizer="fused")


def test_a_line_holds_only_what_differs() -> None:
    assert str(Plan(precision="O1", micro_batch=64)) == "precision=O1 micro_batch=64"
    for field in dataclasses.fields(Plan):
        assert field.name not in str(Plan())


def test_a_line_tells_which_settings_it_names() -> None:
    assert Plan.named("tp=1  micro_batch=2\nbaseline") == {"tp", "micro_batch"}
    assert Plan.named("baseline") == Plan.named("") == frozenset()
    with pytest.raises(ConfigError, match=r"plan\.tq is not a setting"):
        Plan.named("tq=1")


def test_a_table_of_a_plan_is_read_as_the_plan() -> None:
    plan = Plan(tp=2, precision="O1")
    assert Plan.from_toml(f"# a comment\n[plan]\n{plan.to_toml()}") == plan
    with pytest.raises(ConfigError, match="In the plan: model is not a setting"):
        Plan.from_toml('model = "vit-b16"\n[plan]\ntp = 2')


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("bf16", "O1 with dtype=bf16 is autocast"),
        ("16-mixed", "O1 with dtype=fp16 is autocast"),
        ("tf32", "O0 with matmul=high"),
        ("fp8", "O1 with products=fp8"),
    ],
)
def test_a_type_in_place_of_a_level_is_explained(word: str, meaning: str) -> None:
    with pytest.raises(ConfigError, match=f"must be 'O0', 'O1', 'O2' or 'O3'. {meaning}"):
        Plan.parse(f"precision={word}")


def test_every_problem_of_a_line_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        Plan.parse("precison=O1 optimizer=fusd fast compile=none compile=none micro_batch=1.5")
    assert len(caught.value.problems) == 5
    told = str(caught.value)
    for part in (
        "plan.precison is not a setting. Did you mean 'precision'?",
        "Did you mean 'fused'?",
        "'fast' is not a setting",
        "plan.compile is given twice",
        "plan.micro_batch is '1.5', but must be a whole number",
    ):
        assert part in told


def test_from_toml_names_its_problem() -> None:
    with pytest.raises(ConfigError, match=r"In the plan: optimiser is not a setting\. Did you mean 'opt"):
        Plan.from_toml('optimiser = "fused"')
    with pytest.raises(ConfigError, match="not valid TOML"):
        Plan.from_toml("a =")


@pytest.mark.parametrize(
    ("line", "machine", "messages"),
    [
        ("precision=O1", "v100", ["dtype=bf16 cannot be computed on machine v100; use dtype=fp16"]),
        ("precision=O1 dtype=fp16 optimizer=loop", "h100", ["optimizer=loop cannot skip an overflowed step"]),
        ("precision=O3 dtype=fp16 optimizer=foreach", "h100", ["optimizer=foreach cannot skip"]),
        ("dtype=fp16", "h100", ["no effect with plan.precision=O0"]),
        ("matmul=high", "v100", ["matmul=high asks for TF32"]),
        ("attention=flash", "h100", ["attention=flash computes in half precision only"]),
        (
            "precision=O1 dtype=fp16 optimizer=fused attention=cudnn",
            "v100",
            ["attention=cudnn needs a GPU of compute capability 8.0"],
        ),
        ("attention=efficient", "cpu", ["attention=efficient exists on GPUs only"]),
        ("dp=6 sharding=hsdp shard=4", "h100", ["shard=4 does not divide the replicas, plan.dp=6"]),
        ("dp=4 sharding=fsdp shard=2", "h100", ["shard=2 needs plan.sharding=hsdp"]),
        ("dp=2 offload=optimizer", "h100", ["offload=optimizer keeps shards in host memory, but the plan shards"]),
        ("sharding=fsdp offload=optimizer", "h100", ["the plan shards nothing"]),
        (
            "precision=O1 attention=cudnn matmul=medium",
            "v100",
            ["dtype=bf16 cannot", "asks for TF32", "attention=cudnn needs"],
        ),
    ],
)  # fmt: skip
def test_validate_tells_all_that_stands_against(line: str, machine: str, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        require(Plan.parse(line), MODEL, CPU if machine == "cpu" else load_machine(machine), run=True)
    assert len(caught.value.problems) == len(messages)
    for problem, message in zip(caught.value.problems, messages, strict=True):
        assert message in problem


@pytest.mark.parametrize("machine", [CPU, load_machine("h100"), load_machine("v100")], ids=lambda m: m.name)
def test_sound_plans_pass(machine: Machine) -> None:
    half = "bf16" if "bf16" in machine.peak_flops else "fp16"
    forms = ("loop", "foreach", "fused", "contiguous") if half == "bf16" else ("fused", "contiguous")
    for precision, optimizer in itertools.product(("O1", "O3"), forms):
        require(
            Plan.parse(f"precision={precision} dtype={half} optimizer={optimizer}"), MODEL, machine, run=True
        )
    require(Plan(attention="auto", compile="blocks", token_order="batch_second"), MODEL, machine, run=True)


@pytest.mark.parametrize("line", ["gradients=half", "dp=2 sharding=fsdp overlap=false"])
def test_what_only_the_planner_knows_is_refused_by_name(line: str) -> None:
    plan = Plan.parse(line)
    with pytest.raises(ConfigError) as caught:
        require(plan, run=True)
    for word in line.split():
        if not word.startswith(("dp=", "sharding=")):
            assert any(f"plan.{word} " in problem for problem in caught.value.problems), word
    require(Plan(), run=True)


def test_devices_and_batch_of_a_plan() -> None:
    plan = Plan(dp=4, tp=8, pp=6, cp=2, micro_batch=2, accumulate=16)
    assert plan.gpus == 384
    assert plan.global_batch == 128


@pytest.mark.parametrize("comma", [",", ", ", ";"])
def test_commas_are_answered_with_the_line_as_it_should_be(comma: str) -> None:
    with pytest.raises(
        ConfigError, match=r"by spaces, not by commas; write 'precision=O1 optimizer=fused'\.$"
    ):
        Plan.parse(f"precision=O1{comma}optimizer=fused")


def test_the_old_name_of_a_setting_is_read() -> None:
    assert Plan.parse("layout=batch_second") == Plan(token_order="batch_second")
    assert Plan.parse("layout=batch_second").line() == "token_order=batch_second"
    with pytest.raises(ConfigError, match="given twice"):
        Plan.parse("layout=batch_second token_order=batch_first")
