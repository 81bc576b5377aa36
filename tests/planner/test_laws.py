"""What must hold of every prediction, whatever the constants are: drawn models, plans and machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.config import rules
from penstock.config.machine import Machine, load_machine
from penstock.config.model import ModelConfig, preset
from penstock.config.plan import Plan
from penstock.planner import Prediction, predict
from penstock.planner.constants import DEFAULT
from penstock.planner.describe import describe
from penstock.planner.operators import counted_tokens
from penstock.planner.prediction import predict_workload
from penstock.planner.rates import rates_of
from penstock.planner.scaling_laws import BESIROGLU, HOFFMANN, HOFFMANN_UNROUNDED, kaplan, optima
from penstock.planner.step import step

MODELS = (
    "vit-digits", "vit-s16", "vit-b16", "vit-h14", "gpt2", "mpt-1b", "gpt-22b", "llama3-8b", "mixtral-8x7b",
    "bert-base", "t5-base", "bloom-176b",
)  # fmt: skip
MACHINES = ("a100-80g", "h100", "mi300x")
INSTANT = replace(DEFAULT, link_step_seconds=0.0, node_step_seconds=0.0, ramp_seconds=0.0)

models = st.sampled_from(MODELS).map(preset)
machines = st.sampled_from(MACHINES).map(load_machine)


@st.composite
def plans(draw: st.DrawFn, *, devices: bool = True) -> Plan:
    """A Plan on one device, or on several."""
    precision = draw(st.sampled_from(("O0", "O1", "O2", "O3")))
    attention = draw(st.sampled_from(("plain", "efficient", *(("flash",) if precision != "O0" else ()))))
    plan = Plan(
        precision=precision, attention=attention,
        optimizer=draw(st.sampled_from(("loop", "foreach", "fused", "contiguous"))),
        compile=draw(st.sampled_from(("none", "blocks", "whole"))),
        micro_batch=draw(st.sampled_from((1, 2, 8))), accumulate=draw(st.sampled_from((1, 2, 8))),
        recompute=draw(st.sampled_from(("none", "selective", "elementwise", "operators", "early", "full"))),
    )  # fmt: skip
    if not devices:
        return plan
    return replace(
        plan, dp=draw(st.sampled_from((1, 2, 8, 64))),
        sharding=draw(st.sampled_from(("ddp", "zero1", "zero2", "fsdp"))), tp=draw(st.sampled_from((1, 2, 4))),
        pp=draw(st.sampled_from((1, 2, 4))),
    )  # fmt: skip


def figures(prediction: Prediction) -> dict[str, object]:
    """All that a prediction says, but for the plan."""
    return {
        name: getattr(prediction, name)
        for name in Prediction.__dataclass_fields__
        if name not in ("plan", "machine")
    }


def told(model: ModelConfig, machine: Machine, plan: Plan) -> Prediction:
    """The prediction, of plans that can be."""
    assume(not rules.problems(plan, model, machine))
    return predict(model, machine, plan)


WITHOUT_EFFECT = (
    {"sharding": "zero1"}, {"sharding": "zero2"}, {"sharding": "fsdp"}, {"schedule": "gpipe"}, {"overlap": False},
    {"schedule": "zero_bubble"}, {"tp_overlap": "all"}, {"tp_overlap": "none"}, {"cp_exchange": "gather"},
)  # fmt: skip
"""On one device."""


@settings(max_examples=50, deadline=None)
@given(model=models, machine=machines, plan=plans(devices=False), change=st.sampled_from(WITHOUT_EFFECT))
def test_what_has_no_effect_on_one_device_changes_nothing(
    model: ModelConfig, machine: Machine, plan: Plan, change: dict[str, object]
) -> None:
    one, other = (told(model, machine, each) for each in (plan, replace(plan, **change)))  # type: ignore[arg-type]
    assert figures(one) == figures(other)


@settings(max_examples=20, deadline=None)
@given(model=models, plan=plans(devices=False), every=st.sampled_from((2, 5)))
def test_blocks_that_do_not_recompute_do_so_as_often_as_is_said(
    model: ModelConfig, plan: Plan, every: int
) -> None:
    plan = replace(plan, recompute="none")
    machine = load_machine("h100")
    one, other = (told(model, machine, each) for each in (plan, replace(plan, recompute_every=every)))
    assert figures(one) == figures(other)


@settings(max_examples=30, deadline=None)
@given(model=models, machine=machines, plan=plans(devices=False))
def test_two_replicas_over_a_link_that_takes_no_time_step_as_fast_as_one(
    model: ModelConfig, machine: Machine, plan: Plan
) -> None:
    machine = replace(machine, link_bytes_per_second=1e30)
    both = replace(plan, dp=2)
    alone, together = (
        step(describe(model, each), rates_of(machine, each, INSTANT), each).total for each in (plan, both)
    )
    assert together == pytest.approx(alone, rel=1e-9)


FASTER = ("memory_bytes_per_second", "link_bytes_per_second", "node_bytes_per_second", "flops")


@settings(max_examples=80, deadline=None)
@given(model=models, machine=machines, plan=plans(), what=st.sampled_from(FASTER))
def test_a_faster_machine_never_steps_slower(
    model: ModelConfig, machine: Machine, plan: Plan, what: str
) -> None:
    if what == "flops":
        faster = replace(
            machine, peak_flops={name: 2 * rate for name, rate in machine.peak_flops.items()},
            achievable_flops={name: 2 * rate for name, rate in machine.achievable_flops.items()},
        )  # fmt: skip
    else:
        faster = replace(machine, **{what: 2 * getattr(machine, what)})
    before, after = (told(model, each, plan) for each in (machine, faster))
    assert after.iteration_seconds <= before.iteration_seconds * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(model=models, plan=plans(), precision=st.sampled_from((("O0", "O3"), ("O2", "O3"))))
def test_fewer_bytes_never_take_more_memory(
    model: ModelConfig, plan: Plan, precision: tuple[str, str]
) -> None:
    machine = load_machine("h100")
    wide, narrow = (
        # A loss that is not compiled keeps a half output beside the one in fp32.
        told(model, machine, replace(plan, precision=each, attention="efficient", compile="whole"))
        for each in precision  # type: ignore[arg-type]
    )
    # A training loop holds the output in half precision beside the one in fp32 that its loss is made of.
    words = getattr(model, "vocabulary", 0) / plan.tp
    output = 2.0 * plan.micro_batch * counted_tokens(model) * words * (1 + DEFAULT.fragmentation)
    assert narrow.memory_bytes <= wide.memory_bytes * (1 + 1e-9) + output


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(("vit-b16", "vit-h14", "mpt-1b", "gpt-22b", "llama3-8b", "mixtral-8x7b")).map(
        preset
    ),
    plan=plans(),
)
def test_memory_falls_with_every_step_of_sharding(model: ModelConfig, plan: Plan) -> None:
    plan = replace(plan, dp=8, pp=1)
    machine = load_machine("h100")
    sizes = [
        told(model, machine, replace(plan, sharding=kind)).memory_bytes  # type: ignore[arg-type]
        for kind in ("ddp", "zero1", "zero2", "fsdp")
    ]
    assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=30, deadline=None)
@given(model=models, machine=machines, plan=plans())
def test_the_ladder_forecasts_what_is_predicted(model: ModelConfig, machine: Machine, plan: Plan) -> None:
    """The ladder predicts the operators that `describe` lists for its subject."""
    expected = told(model, machine, plan)
    found = predict_workload(describe(model, plan, machine.device), machine, plan)
    if plan.tp == 1:
        assert figures(found) == figures(expected)
    assert found.iteration_seconds == expected.iteration_seconds


@settings(max_examples=60, deadline=None)
@given(model=models, machine=machines, plan=plans())
def test_parts_are_never_negative_and_sum_to_the_whole(
    model: ModelConfig, machine: Machine, plan: Plan
) -> None:
    one = told(model, machine, plan)
    assert min(one.seconds.values()) >= 0.0
    assert min(one.memory.values()) >= 0
    assert sum(one.seconds.values()) == pytest.approx(one.iteration_seconds)
    assert sum(one.memory.values()) == pytest.approx(one.memory_bytes, rel=1e-6)
    assert 0 < one.mfu <= one.hfu * (1 + 1e-12) < 1


# The published optima, which disagree, and what over-training costs.


CHINCHILLA = 5.76e23


@pytest.mark.parametrize(
    ("law", "parameters", "tokens", "ratio", "loss"),
    [
        (HOFFMANN, 3.219e10, 2.982e12, 92.6, 1.9307),
        (HOFFMANN_UNROUNDED, 4.031e10, 2.382e12, 59.1, 1.9184),
        (BESIROGLU, 7.225e10, 1.329e12, 18.4, 1.9744),
    ],
)
def test_at_chinchilla_s_compute_the_laws_disagree(
    law: object, parameters: float, tokens: float, ratio: float, loss: float
) -> None:
    best = law.optimum(CHINCHILLA)  # type: ignore[attr-defined]
    assert best.parameters == pytest.approx(parameters, rel=2e-3)
    assert best.tokens == pytest.approx(tokens, rel=2e-3)
    assert best.tokens_per_parameter == pytest.approx(ratio, rel=2e-3)
    assert best.loss == pytest.approx(loss, abs=2e-4)


@pytest.mark.parametrize("law", [HOFFMANN, HOFFMANN_UNROUNDED, BESIROGLU])
def test_the_closed_form_is_a_minimum(law: object) -> None:
    best = law.optimum(1e22)  # type: ignore[attr-defined]
    assert 6 * best.parameters * best.tokens == pytest.approx(1e22)
    for factor in (0.7, 0.95, 1.05, 1.4):
        assert law.at(1e22, best.parameters * factor).loss > best.loss  # type: ignore[attr-defined]


def test_kaplan_wants_larger_models() -> None:
    best = kaplan(CHINCHILLA)
    assert best.parameters > 4 * BESIROGLU.optimum(CHINCHILLA).parameters
    assert best.tokens_per_parameter < 2
    assert len(optima(CHINCHILLA)) == 4


def test_more_serving_wants_smaller_models_of_the_same_loss() -> None:
    best = BESIROGLU.optimum(1e23)
    assert BESIROGLU.with_inference(best, 0.0) == best
    some = BESIROGLU.with_inference(best, 1e12)
    much = BESIROGLU.with_inference(best, 1e14)
    assert much.parameters < some.parameters < best.parameters
    assert BESIROGLU.loss(much.parameters, much.tokens) == pytest.approx(best.loss)
    assert much.compute_flops > best.compute_flops
    assert BESIROGLU.smaller(best, 0.001) is None


def test_no_compute_is_an_error() -> None:
    with pytest.raises(ValueError, match="must be a number of FLOPs above 0"):
        optima(0.0)
