"""What every rung must hold, and what the single ones change."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any, get_args

import pytest

from helpers.toy import TOY
from penstock.config.machine import Machine, load_machine
from penstock.config.model import PRESETS
from penstock.config.plan import AttentionBackend, Plan
from penstock.config.rules import require
from penstock.errors import ConfigError
from penstock.ladder.account import changes
from penstock.ladder.rung import Rung, Setting, Situation, register
from penstock.ladder.rungs import all_rungs, choose
from penstock.planner import predict
from penstock.planner.describe import totals

FIRST = Setting(model=PRESETS["vit-s16"], plan=Plan(micro_batch=8))
OWN = Setting(model=None, plan=Plan(micro_batch=8))


def _situation(machine: Machine, procs: int = 4) -> Situation:
    switches = {"attention": get_args(AttentionBackend), "token_order": ("batch_first", "batch_second")}
    return Situation(machine=machine, micro_batch=8, switches=switches, procs=procs)


def _holds(machine: Machine, setting: Setting) -> bool:
    assert setting.model is not None
    return predict(setting.model, machine, setting.plan).fits


def _named(name: str) -> Rung:
    return next(rung for rung in all_rungs() if rung.name == name)


@pytest.mark.parametrize("rung", all_rungs(), ids=lambda rung: rung.name)
def test_a_rung_changes_one_thing_and_says_why(rung: Rung) -> None:
    situation = _situation(load_machine("h100"))
    changed = rung.apply(FIRST, situation)
    assert changed != FIRST
    # Climbing twice is climbing once, of what others build on.
    assert rung.apply(changed, situation) == changed or not rung.carried
    assert Plan.parse(changed.plan.line()) == changed.plan
    assert rung.why.endswith(".")
    assert rung.title == rung.title.strip()
    assert len(rung.title) <= 22  # it stands below a bar
    assert changed.model is not None
    assert FIRST.model is not None
    differing = [f.name for f in fields(Plan) if getattr(changed.plan, f.name) != getattr(FIRST.plan, f.name)]
    differing += [
        f.name for f in fields(FIRST.model) if getattr(changed.model, f.name) != getattr(FIRST.model, f.name)
    ]
    pairs = (
        {"precision", "dtype", "master"}, {"dp", "sharding", "shard", "gather"}, {"pp", "micro_batch", "accumulate"},
        {"algorithm", "optimizer"}, {"micro_batch", "recompute"},
    )  # fmt: skip
    assert any(set(differing) <= pair for pair in pairs) or len(differing) == 1


@pytest.mark.parametrize("machine", ["v100", "a100-80g", "h100"])
def test_what_no_rung_objects_to_is_a_valid_plan_once_climbed_to(machine: str) -> None:
    """Climbing everything on a GPU ends in a plan that the validation accepts at each step, or says why not."""
    situation = _situation(load_machine(machine))
    setting = FIRST
    for rung in all_rungs():
        if rung.refusal(setting, situation) is None:
            setting = rung.apply(setting, situation)
            assert setting.model is not None
            require(setting.plan, setting.model, situation.machine, run=True)
    assert (setting.plan.algorithm, setting.plan.optimizer) == (
        "muon",
        "fused",
    )  # flat buffers hold no matrices
    assert setting.plan.precision == "O3"
    assert setting.plan.dtype == ("fp16" if machine == "v100" else "bf16")
    assert setting.plan.micro_batch == 32
    assert (setting.plan.dp, setting.plan.sharding, setting.plan.shard) == (4, "hsdp", 2)
    assert setting.plan.attention == ("efficient" if machine == "v100" else "cudnn")


def test_the_order_is_that_of_the_ladder() -> None:
    order = [rung.name for rung in all_rungs()]
    told = [
        "matmul", "half-bf16", "optimizer-foreach", "optimizer-fused", "optimizer-contiguous", "masters",
        "classifier", "token-order",
        "attention-plain", "compile-blocks", "compile-whole", "fp8", "int8", "batch-x2", "parallel-context",
        "parallel-ddp", "parallel-fsdp", "parallel-fsdp-fp8", "parallel-hsdp", "image", "compress-depth",
        "compress-width", "muon", "whole-half",
    ]  # fmt: skip
    assert [name for name in order if name in told] == told


def test_masters_and_fp8_build_upon_what_they_need() -> None:
    hopper, ampere = _situation(load_machine("h100")), _situation(load_machine("a100-80g"))
    masters, fp8 = _named("masters"), _named("fp8")
    assert "replaces the bf16 products" in str(fp8.refusal(FIRST, hopper))
    fused = replace(FIRST, plan=Plan(micro_batch=8, optimizer="fused"))
    plan = masters.apply(fused, hopper)
    assert fp8.refusal(plan, hopper) is None
    assert "needs a GPU with fp8 units" in str(fp8.refusal(plan, ampere))
    top = fp8.apply(plan, hopper)
    assert top.plan.line() == "precision=O2 optimizer=fused products=fp8_tensorwise"
    assert top.model is not None
    require(top.plan, top.model, hopper.machine, run=True)
    several, gathered = replace(hopper, procs=2), _named("parallel-fsdp-fp8")
    assert "use products=fp8_tensorwise" in str(gathered.refusal(plan, several))
    assert gathered.refusal(top, several) is None
    assert gathered.apply(top, several).plan.line().endswith("products=fp8_tensorwise")
    whole = _named("whole-half").apply(top, hopper)
    assert whole.plan.line() == "precision=O3 optimizer=fused"
    require(whole.plan, PRESETS["vit-s16"], hopper.machine, run=True)
    assert "cannot skip an overflowed step" in str(masters.refusal(FIRST, _situation(load_machine("v100"))))


@pytest.mark.parametrize("name", ["classifier", "image", "compress-depth"])
def test_rungs_that_rebuild_the_model_do_not_apply_to_a_model_of_ones_own(name: str) -> None:
    reason = _named(name).refusal(OWN, _situation(TOY))
    assert reason is not None
    assert "your own" in reason


def test_obstacles_of_the_situation() -> None:
    cpu = _situation(TOY)
    fixed = replace(cpu, switches={})
    assert "no token order but" in str(_named("token-order").refusal(OWN, fixed))
    assert "cannot be switched to attention=plain" in str(_named("attention-plain").refusal(OWN, fixed))
    assert "split into samples" in str(_named("batch-x2").refusal(OWN, replace(cpu, splittable=False)))
    for gib, why in ((16, "None"), (80, "a batch × 2 fits into memory without recomputation")):
        memory = replace(load_machine("h100"), memory_bytes=gib << 30)
        situation = replace(_situation(memory), micro_batch=256, holds=partial(_holds, memory))
        large = replace(FIRST, plan=Plan(micro_batch=256, precision="O1"))
        assert why in str(_named("batch-x2-recomputed").refusal(large, situation)), gib
    assert "exists on GPUs only" in str(_named("attention-cudnn").refusal(FIRST, cpu))
    assert "dtype=fp16 cannot be computed" in str(_named("half-fp16").refusal(FIRST, cpu))
    assert "loss scale" in str(_named("half-fp16").refusal(FIRST, _situation(load_machine("h100"))))
    assert "asks for TF32" in str(_named("matmul").refusal(FIRST, _situation(load_machine("v100"))))
    pooled = replace(FIRST, model=PRESETS["vit-digits"])
    assert "already" in str(_named("classifier").refusal(pooled, cpu))
    distilled = replace(FIRST, model=replace(PRESETS["vit-digits"], classifier="token", distilled=True))
    assert "needs a class token" in str(_named("classifier").refusal(distilled, cpu))
    narrow = replace(TOY, peak_flops={"fp32": 1e11})
    assert "dtype=bf16 cannot be computed" in str(_named("half-bf16").refusal(FIRST, _situation(narrow)))
    assert "dtype=fp16 cannot be computed" in str(_named("whole-half").refusal(FIRST, _situation(narrow)))


def test_processes_are_asked_for_and_groups_need_four() -> None:
    ddp, fsdp, hsdp = (_named(f"parallel-{name}") for name in ("ddp", "fsdp", "hsdp"))
    for rung in (ddp, fsdp, hsdp):
        assert "--procs 2" in str(rung.refusal(FIRST, _situation(TOY, procs=1)))
    two, six = _situation(TOY, procs=2), _situation(TOY, procs=6)
    assert _named("parallel-context").apply(FIRST, two).plan.line() == "cp=2"
    assert ddp.apply(_named("parallel-context").apply(FIRST, two), two).plan.line() == "dp=2"
    assert ddp.apply(FIRST, two).plan.line() == "dp=2"
    assert fsdp.refusal(FIRST, two) is None
    assert fsdp.apply(FIRST, two).plan.line() == "dp=2 sharding=fsdp"
    for procs in (2, 3, 5):
        assert "--procs 4" in str(hsdp.refusal(FIRST, _situation(TOY, procs=procs)))
    assert hsdp.refusal(FIRST, six) is None
    assert hsdp.apply(FIRST, six).plan.line() == "dp=6 sharding=hsdp shard=3"


def test_the_larger_image_of_the_usual_size_is_256() -> None:
    situation = _situation(TOY)
    image = _named("image")
    larger = image.apply(FIRST, situation).model
    assert larger is not None
    assert larger.image_size == 256
    h14 = image.apply(replace(FIRST, model=PRESETS["vit-h14"]), situation).model
    assert h14 is not None
    assert h14.image_size == 252  # 14-pixel patches do not divide 256


@pytest.mark.parametrize("name", ["compress-depth", "compress-width"])
def test_every_preset_can_be_compressed_and_computes_less(name: str) -> None:
    rung, situation = _named(name), _situation(TOY)
    for model in PRESETS.values():
        setting = replace(FIRST, model=model)
        assert rung.hindrance(setting, situation) is None
        changed = rung.apply(setting, situation).model
        assert changed is not None
        assert 0.3 < totals(changed).model_flops / totals(model).model_flops < 0.99, model
    once = replace(FIRST, model=replace(PRESETS["vit-digits"], depth=1))
    assert (rung.hindrance(once, situation) is None) == (name == "compress-width")
    pruned: Any = PRESETS["vit-digits"]
    pruned = replace(pruned, unequal=tuple(replace(layer.sizes, hidden=8) for layer in pruned.layers))
    assert (rung.hindrance(replace(FIRST, model=pruned), situation) is None) == (name == "compress-depth")
    if name == "compress-depth":
        shallow: Any = rung.apply(replace(FIRST, model=pruned), situation)
        assert shallow.model.layers == pruned.layers[::2]
        translator = replace(FIRST, model=PRESETS["marian-tiny"])
        depth: Any = PRESETS["marian-tiny"]
        assert changes(translator, rung.apply(translator, situation)) == {
            "encoder.depth": (depth.encoder.depth + 1) // 2, "decoder.depth": (depth.decoder.depth + 1) // 2,
        }  # fmt: skip


def test_names_and_groups_choose() -> None:
    names = ["matmul", "matmul-probed", "compile-blocks", "compile-whole"]
    assert [r.name for r in choose(("compile", "matmul"))] == names
    assert "compile-whole" not in {r.name for r in choose(skip=("compile",))}
    assert [r.name for r in choose(("optimizer",), ("optimizer-foreach",))] == [
        "optimizer-fused",
        "optimizer-contiguous",
    ]
    with pytest.raises(ConfigError, match=r"no rung 'matmull'. Did you mean 'matmul'"):
        choose(("matmull",))


def test_a_name_is_taken_once() -> None:
    matmul = _named("matmul")
    assert register(matmul) is matmul  # importing a module again is no conflict
    with pytest.raises(ConfigError, match="already is a rung named 'matmul'"):
        register(replace(matmul, title="another"))
