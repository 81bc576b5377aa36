"""The run as a whole, in one process: what it writes, when it refuses, and that it resumes exactly under every Plan."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.runs import events_of, losses_of, records_of
from helpers.sweeps import sweep
from helpers.toy import desk
from penstock import checkpoint
from penstock.config.load import load, to_dict
from penstock.config.machine import load_machine
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import Augment, Recipe, RunConfig
from penstock.data import image_loader, open_source
from penstock.errors import (
    CheckpointError,
    ConfigError,
    EnvironmentProblem,
    NumericError,
    OutOfMemory,
    SavedInterrupt,
    SavedRequeue,
)
from penstock.models.convert import from_pretrained
from penstock.planner import predict
from penstock.tasks import ImageClassification
from penstock.train import loop, train
from penstock.train.callbacks import Callback, Record, trackers
from penstock.train.evaluate import evaluate
from penstock.train.metrics import Records

MODEL = ViTConfig(
    image_size=8, patch_size=4, channels=1, width=16, depth=2, heads=2, mlp_width=32, classes=10,
    classifier="pooled", dropout=0.1, drop_path=0.2,
)  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Eight steps of 2 × 16 samples."""
    return RunConfig(
        model=MODEL, recipe=Recipe(steps=8, lr=3e-3, warmup_steps=2, augment=Augment(flip=0.0, mixup=0.2)),
        plan=Plan(micro_batch=16, accumulate=2), machine=desk(tmp_path), output=str(tmp_path / "run"),
        device="cpu", seed=5, checkpoint_every=3, log_every=2,
    )  # fmt: skip


class At(Callback):
    """Calls `action` when `step` is recorded."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.step = step
        self.action = action

    def on_step(self, record: Record) -> None:
        if record["step"] == self.step:
            self.action()


class Cut(Exception):
    """Ends a run without a chance to save."""


def cut() -> None:
    raise Cut


def train_cut_at(config: RunConfig, step: int) -> None:
    """Train until `step`, which ends the run without a chance to save."""
    with pytest.raises(Cut):
        train(config, callbacks=[At(step, cut)])


def final_tensors(config: RunConfig) -> dict[str, torch.Tensor]:
    folder = Path(config.output) / "checkpoints" / f"step-{config.recipe.steps}"
    files = sorted(folder.glob("*.safetensors"))
    return {f"{file.stem}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


PLANS = [
    "", "optimizer=foreach", "optimizer=fused", "optimizer=contiguous",
    "matmul=medium token_order=batch_second attention=plain", "precision=O1 optimizer=fused attention=auto",
    "precision=O3 optimizer=contiguous", "precision=O1 dtype=fp16 optimizer=fused",
    "precision=O3 dtype=fp16 optimizer=contiguous", "precision=O1 optimizer=fused products=int8_all",
]  # fmt: skip


@pytest.mark.parametrize("line", sweep(PLANS, ["", *PLANS[-3:]]))
def test_a_cut_run_resumes_bit_for_bit_under_every_plan(config: RunConfig, line: str) -> None:
    plan = Plan.parse(f"{line} micro_batch=16 accumulate=2")
    whole = replace(config, plan=plan, recipe=replace(config.recipe, ema_decay=0.9))
    train(whole)
    broken = replace(whole, output=f"{whole.output}-broken")
    train_cut_at(broken, 4)
    assert train(broken).resumed_at == 3
    assert losses_of(broken.output) == losses_of(whole.output)
    assert len(losses_of(whole.output)) == 8
    ours, theirs = final_tensors(broken), final_tensors(whole)
    assert ours.keys() == theirs.keys()
    assert {name.split("/")[0] for name in ours} >= {"weights", "ema", "optimizer", "random"}
    assert [name for name in ours if not ours[name].equal(theirs[name])] == []


def test_the_same_values_give_the_same_run_and_another_seed_another(config: RunConfig) -> None:
    train(config)
    train(replace(config, output=f"{config.output}-again"))
    train(replace(config, output=f"{config.output}-other", seed=6))
    assert losses_of(config.output) == losses_of(f"{config.output}-again")
    assert losses_of(config.output) != losses_of(f"{config.output}-other")


def test_what_a_run_leaves(config: RunConfig) -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    result = train(config)
    assert torch.equal(torch.get_rng_state(), before)
    output = Path(config.output)
    assert sorted(p.name for p in output.iterdir()) == [
        "checkpoints", "export", "lock", "metrics.jsonl", "names", "pictures", "run.toml",
    ]  # fmt: skip
    assert checkpoint.steps(output / "checkpoints") == [6, 8]
    assert load(RunConfig, file=output / "run.toml") == config
    assert to_dict(config) == checkpoint.load(output / "checkpoints" / "step-8").config
    expected = [("start", 0), ("prediction", 0), ("steps", 2), ("steps", 3), ("checkpoint", 3), ("steps", 4)]
    expected += [
        ("steps", 6), ("checkpoint", 6), ("steps", 8), ("evaluation", 8), ("checkpoint", 8), ("summary", 8),
    ]  # fmt: skip
    assert events_of(config.output) == expected
    assert (result.steps, result.resumed_at) == (8, 0)
    assert result.loss == pytest.approx(sum(losses_of(config.output)[-2:]) / 2)


def test_records_hold_speed_utilisation_memory_and_predictions(config: RunConfig) -> None:
    train(config)
    records = records_of(config.output)
    steps = records_of(config.output, "steps")[0]
    names = (
        "samples_per_second", "step_seconds_median", "step_seconds_p95", "model_flops_per_second", "mfu", "hfu",
    )  # fmt: skip
    assert all(steps[name] > 0 for name in (*names, "memory_bytes", "lr", "grad_norm", "epoch"))
    assert 0 <= steps["data_wait_share"] <= 1
    start, summary = records[0], records[-1]
    assert start["peak"] == "desk fp32, measured"
    assert start["plan"] == config.plan.line()
    assert config.machine is not None
    prediction = predict(config.model, load_machine(config.machine), config.plan)
    (before,) = records_of(config.output, "prediction")
    for name in ("iteration_seconds", "samples_per_second", "memory_bytes", "mfu", "hfu"):
        assert summary["predicted"][name] == before[name] == getattr(prediction, name)
    assert summary["measured"]["step_seconds_median"] > 0
    assert 0 < summary["measured"]["data_wait_share"] <= 1
    assert summary["measured"]["memory_kind"] == "of tensors"
    # Of a quarter of a megabyte, measured +4.7 %, and once -5.3 % on a busy machine.
    assert summary["measured"]["memory_bytes"] == pytest.approx(
        summary["predicted"]["memory_bytes"], rel=0.08
    )


def test_the_exported_model_is_the_one_that_was_evaluated(config: RunConfig) -> None:
    averaged = replace(config, recipe=replace(config.recipe, ema_decay=0.5))
    result = train(averaged)
    model = from_pretrained(result.export)
    source = open_source(config.data, split="val", channels=1, image_size=8)
    found = evaluate(
        ImageClassification(), model, image_loader(source, batch=16, image_size=8, classes=10, endless=False)
    )
    assert (found.samples, found.top1) == (result.evaluation.samples, result.evaluation.top1)
    assert found.loss == pytest.approx(result.evaluation.loss, rel=1e-6)
    tensors = final_tensors(averaged)
    assert [n for n, p in model.named_parameters() if not tensors[f"ema/{n}"].equal(p)] == []


def test_a_finished_run_has_nothing_left_to_do(config: RunConfig) -> None:
    first = train(config)
    told = events_of(config.output)
    again = train(config)
    assert (again.steps, again.resumed_at, again.loss, again.evaluation) == (
        8, 8, first.loss, first.evaluation,
    )  # fmt: skip
    assert [event for event in events_of(config.output) if event[0] not in ("resume", "prediction")] == [
        event for event in told if event[0] != "prediction"
    ]
    assert [path.name for path in Path(config.output).glob("export*")] == ["export"], (
        "the same is not kept twice"
    )


def test_starting_anew_deletes_nothing(config: RunConfig) -> None:
    train(config)
    first = losses_of(config.output)
    train(replace(config, seed=8), resume=False)
    assert len(losses_of(config.output)) == 8
    assert losses_of(config.output) != first
    output = Path(config.output)
    assert checkpoint.steps(output / "checkpoints.before-1") == [6, 8]
    assert (output / "metrics.before-1.jsonl").exists()
    assert (output / "export.before-1").is_dir()


def test_another_recipe_is_not_resumed_silently(config: RunConfig) -> None:
    train(config)
    other = replace(config, recipe=replace(config.recipe, lr=0.5))
    with pytest.raises(ConfigError, match=r"recipe\.lr is 0\.5"):
        train(other)
    assert load(RunConfig, file=Path(config.output) / "run.toml") == config


def test_a_setting_newer_than_the_checkpoint_had_its_default(config: RunConfig) -> None:
    train_cut_at(config, 4)
    folder = Path(config.output) / "checkpoints"
    saved = checkpoint.load(folder / "step-3")
    older = {name: value for name, value in saved.config.items() if name != "init_from"}
    older["recipe"] = {name: value for name, value in saved.config["recipe"].items() if name != "layer_decay"}
    shutil.rmtree(folder)
    checkpoint.save(folder, replace(saved, config=older))
    assert train(config).resumed_at == 3


def test_a_new_split_of_the_batch_resumes_and_is_said(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    train_cut_at(config, 4)
    assert train(replace(config, plan=Plan(micro_batch=8, accumulate=4))).resumed_at == 3
    assert "plan.micro_batch was 16 and is now 8." in caplog.text


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("recompute=budget", True), ("recompute=full recompute_every=2", True), ("host_memory=keep", True),
        ("attention=plain optimizer=fused token_order=batch_second", False),
        ("precision=O1", None),
    ],
)  # fmt: skip
def test_a_run_goes_on_with_another_plan(config: RunConfig, line: str, same: bool | None) -> None:
    config = replace(config, model=replace(MODEL, dropout=0.0, drop_path=0.0))
    whole = replace(config, output=f"{config.output}-whole")
    train(whole)
    train_cut_at(config, 4)
    plan = Plan.parse(f"micro_batch=16 accumulate=2 {line}")
    assert train(replace(config, plan=plan)).resumed_at == 3
    expected, got = losses_of(whole.output), losses_of(config.output)
    # With products in bf16, 2.5e-5 of a loss of 2.3 were measured.
    assert got == expected if same else got == pytest.approx(expected, rel=1e-5 if same is False else 1e-3)


def test_two_runs_do_not_share_a_directory(config: RunConfig) -> None:
    def second() -> None:
        with pytest.raises(EnvironmentProblem, match="is in use by process"):
            train(config)
        cut()

    with pytest.raises(Cut):
        train(config, callbacks=[At(2, second)])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_request_saves_the_next_step(config: RunConfig, number: signal.Signals) -> None:
    with pytest.raises(SavedRequeue, match=f"{number.name} after step 4") as caught:
        train(config, callbacks=[At(4, lambda: os.kill(os.getpid(), number))])
    assert caught.value.exit_code == 75
    assert checkpoint.steps(Path(config.output) / "checkpoints") == [3, 4]
    assert train(config).resumed_at == 4


def test_ctrl_c_saves_the_step_and_says_how_to_go_on(
    config: RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    words = "Stopped by Ctrl-C after step 4 of 8, .* The same command goes on from there without --no-resume"
    with pytest.raises(SavedInterrupt, match=words) as caught:
        train(config, resume=False, callbacks=[At(4, lambda: os.kill(os.getpid(), signal.SIGINT))])
    assert caught.value.exit_code == 130, "no scheduler starts it again"
    assert "Press it again to end at once" in capfd.readouterr().err
    assert train(config).resumed_at == 4


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_at_once(config: RunConfig, first: signal.Signals) -> None:
    def twice() -> None:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config, callbacks=[At(4, twice)])
    assert checkpoint.steps(Path(config.output) / "checkpoints") == [3]


def test_an_evaluation_that_was_due_when_the_run_was_stopped_is_made_up_for_once(config: RunConfig) -> None:
    often = replace(config, recipe=replace(config.recipe, eval_every_epochs=4 * 32 / 1442))
    train(often)
    assert [event for event in events_of(often.output) if event[0] == "evaluation"] == [
        ("evaluation", 4),
        ("evaluation", 8),
    ]
    broken = replace(often, output=f"{often.output}-broken")
    with pytest.raises(SavedRequeue, match="after step 4"):
        train(broken, callbacks=[At(4, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    assert ("evaluation", 4) not in events_of(broken.output)
    train_cut_at(broken, 6)
    train(broken)

    def told(config: RunConfig) -> list[Any]:
        return [(r["step"], r["top1"], r["loss"]) for r in records_of(config.output, "evaluation")]

    assert told(broken) == told(often)


def test_a_stop_request_at_the_last_step_finishes_the_run(config: RunConfig) -> None:
    result = train(config, callbacks=[At(8, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    assert result.steps == 8
    assert result.export.is_dir()


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(config: RunConfig) -> None:
    wild = replace(config, recipe=replace(config.recipe, lr=1e30, clip_norm=None, warmup_steps=0))
    with pytest.raises(NumericError, match=r"By step 4, 3 steps in a row .* begins in the output"):
        train(wild)
    assert checkpoint.steps(Path(config.output) / "checkpoints") == []
    assert {name for name, _ in events_of(wild.output)} == {"start", "prediction", "steps"}


def test_weights_not_finite_are_not_saved(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    original = loop._Run._train_step

    def poisoned(run: Any) -> None:
        original(run)
        if run.step == 6:
            with torch.no_grad():
                run.built.model.head.weight[0, 0] = float("nan")

    monkeypatch.setattr(loop._Run, "_train_step", poisoned)
    with pytest.raises(NumericError, match=r"After step 6 weights are not finite: head\.weight"):
        train(config)
    assert checkpoint.steps(Path(config.output) / "checkpoints") == [3]


def test_running_out_of_memory_says_advice(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(run: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB.")

    monkeypatch.setattr(loop._Run, "_train_step", exhausted)
    with pytest.raises(OutOfMemory, match="micro_batch=8 accumulate=4"):
        train(config)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_is_full_when_a_record_is_written_ends_the_run_with_a_sentence(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.train.metrics.own_file", lambda folder, name: folder / name)
    monkeypatch.setattr(Records, "rewind", lambda self, *_, **__: self.path.symlink_to("/dev/full"))
    with pytest.raises(
        EnvironmentProblem, match=r"metrics\.jsonl cannot be read or written: the disk is full"
    ):
        train(config)


def test_none_of_the_checkpoints_valid_ends_with_its_code(config: RunConfig) -> None:
    train(config)
    for file in (Path(config.output) / "checkpoints").glob("step-*/manifest.json"):
        file.unlink()
    with pytest.raises(CheckpointError) as caught:
        train(config)
    assert caught.value.exit_code == 5


def test_weights_to_start_from_are_taken_by_model_and_average(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    export = train(config).export
    recipe = replace(config.recipe, steps=1, lr=1e-12, warmup_steps=0, ema_decay=0.999)
    second = replace(config, output=f"{config.output}-2", recipe=recipe, init_from=str(export), seed=77)
    train(second)
    tensors = final_tensors(second)
    for name, parameter in from_pretrained(export).named_parameters():
        torch.testing.assert_close(tensors[f"weights/{name}"], parameter.detach(), atol=1e-6, rtol=0)
        torch.testing.assert_close(tensors[f"ema/{name}"], parameter.detach(), atol=1e-6, rtol=0)


def test_callbacks_hear_of_everything_and_change_nothing(config: RunConfig) -> None:
    heard: list[tuple[str, int]] = []

    class Listener(Callback):
        def on_start(self, record: Record) -> None:
            heard.append(("start", record["step"]))

        def on_step(self, record: Record) -> None:
            assert math.isfinite(record["loss"])
            heard.append(("step", record["step"]))

        def on_evaluation(self, record: Record) -> None:
            heard.append((f"evaluation of {record['samples']}", record["step"]))

        def on_save(self, record: Record) -> None:
            assert Path(record["path"]).is_dir()
            heard.append(("save", record["step"]))

        def on_end(self) -> None:
            heard.append(("end", 0))

    config = replace(config, log_every=2, recipe=replace(config.recipe, steps=6))
    train(replace(config, output=f"{config.output}-plain"))
    train(config, callbacks=[Listener()])
    assert heard[0] == ("start", 0)
    assert [step for what, step in heard if what == "step"] == [2, 3, 4, 6], (
        "what is pending is logged before it is saved"
    )
    assert heard[-3:] == [("evaluation of 355", 6), ("save", 6), ("end", 0)]
    one, other = (
        final_tensors(replace(config, output=folder)) for folder in (config.output, f"{config.output}-plain")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_a_callback_raises_ends_the_run_and_closes_what_is_open(config: RunConfig) -> None:
    closed = []

    class Broken(Callback):
        def on_step(self, record: Record) -> None:
            raise ValueError("mine")

        def on_end(self) -> None:
            closed.append(True)

    with pytest.raises(ValueError, match="mine"):
        train(replace(config, log_every=1), callbacks=[Broken()])
    assert closed == [True]


def test_tensorboard_and_a_profile_are_written_on_request(config: RunConfig) -> None:
    train(
        replace(config, recipe=replace(config.recipe, steps=8)),
        callbacks=trackers("tensorboard"),
        profile=True,
    )
    output = Path(config.output)
    assert list((output / "tensorboard").glob("events.out.tfevents.*"))
    (record,) = records_of(output, "profile")
    trace = json.loads(Path(record["trace"]).read_text())
    # What Perfetto reads: complete events ("X") with a start and a duration.
    spans = [
        event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event and "ts" in event
    ]
    assert {"aten::addmm", "aten::mm"} & {event["name"] for event in spans}
    assert record["profiled"] == 3
    assert len(record["operators"]) == 10
    shares = [one["share"] for one in record["operators"]]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1 + 1e-9
    parts = {row["name"]: row for row in record["parts"]}
    assert {"products, forward", "products, backward", "optimizer", "norms"} <= set(parts)
    assert all(
        parts[name]["milliseconds"] > parts[name]["least_milliseconds"] > 0
        for name in ("products, forward", "products, backward")
    )
    assert Path(record["table"]).read_text().count("\n") == 11 + len(parts) + 3


def test_a_run_too_short_to_profile_ends_all_the_same(config: RunConfig) -> None:
    train(replace(config, recipe=replace(config.recipe, steps=2, warmup_steps=0)), profile=True)
    assert not (Path(config.output) / "profile").exists()


def test_a_plan_that_contradicts_the_machine_ends_before_anything_is_built(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match="exists on GPUs only"):
        train(replace(config, plan=replace(config.plan, attention="cudnn")))
    assert not (Path(config.output) / "metrics.jsonl").exists()


class _Syncs(TorchDispatchMode):
    """Counts operators that make the host wait for a device's value."""

    WAITING = ("aten._local_scalar_dense", "aten.is_nonzero", "aten.nonzero", "aten.equal", "aten.item")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(self.WAITING):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def _count_syncs(monkeypatch: pytest.MonkeyPatch, config: RunConfig) -> tuple[_Syncs, _Syncs]:
    """(within steps, between steps)"""
    within, between = _Syncs(), _Syncs()
    for name, counter in (("_train_step", within), ("_log", between), ("_save", between)):
        original = getattr(loop._Run, name)

        def counted(run: Any, original: Any = original, counter: _Syncs = counter) -> None:
            with counter:
                original(run)

        monkeypatch.setattr(loop._Run, name, counted)
    train(config)
    return within, between


@pytest.mark.parametrize(
    "line", ["optimizer=fused", "optimizer=contiguous", "precision=O1 optimizer=contiguous"]
)
def test_no_step_waits_for_the_device(config: RunConfig, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    recipe = replace(config.recipe, ema_decay=0.9, layer_decay=0.8)
    busy = replace(config, plan=Plan.parse(f"{line} micro_batch=16 accumulate=2"), recipe=recipe)
    within, between = _count_syncs(monkeypatch, busy)
    assert within.found == []
    assert between.found  # a save looks at the weights: the counter counts


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["loop", "foreach", "fused", "contiguous"])
def test_no_step_waits_for_a_gpu(config: RunConfig, monkeypatch: pytest.MonkeyPatch, form: Any) -> None:
    original = loop._Run._train_step

    def strict(run: Any) -> None:
        torch.cuda.set_sync_debug_mode(
            "error" if run.step else "default"
        )  # the first step may compile and allocate
        try:
            original(run)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(loop._Run, "_train_step", strict)
    plan = Plan(precision="O1", optimizer=form, micro_batch=16, accumulate=2)
    train(
        replace(config, device="cuda", machine=None, plan=plan, recipe=replace(config.recipe, ema_decay=0.9))
    )
    assert len(losses_of(config.output)) == 8


@pytest.mark.gpu
def test_a_cut_run_resumes_on_a_gpu(config: RunConfig) -> None:
    whole = replace(config, device="cuda", machine=None, recipe=replace(config.recipe, ema_decay=0.9))
    train(whole)
    broken = replace(whole, output=f"{whole.output}-broken")
    train_cut_at(broken, 4)
    train(broken)
    # Kernels on a GPU may add in another order from run to run; the generators and the data must be the same.
    torch.testing.assert_close(
        torch.tensor(losses_of(broken.output)), torch.tensor(losses_of(whole.output)), rtol=1e-4, atol=1e-5
    )


def test_saving_in_the_background_changes_nothing_that_is_computed_or_saved(config: RunConfig) -> None:
    train(config)
    beside = replace(config, output=config.output + "-2", save_in_background=True)
    train_cut_at(beside, 4)
    folder = Path(beside.output) / "checkpoints"
    assert checkpoint.steps(folder) == [3]
    with pytest.raises(SavedRequeue):
        train(beside, callbacks=[At(6, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    newest = checkpoint.steps(folder)[-1]
    assert newest >= 6
    assert train(beside).resumed_at == newest
    assert losses_of(beside.output) == losses_of(config.output)
    ours, theirs = final_tensors(beside), final_tensors(config)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_save_that_fails_in_the_background_ends_the_run_at_the_next(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.checkpoint.storage.write_tensors", full)
    with pytest.raises(EnvironmentProblem, match=r"step-3 could not be written: .*No space"):
        train(replace(config, save_in_background=True))
    assert list((Path(config.output) / "checkpoints").iterdir()) == []


def test_no_file_of_a_run_is_written_through_a_link(config: RunConfig, tmp_path: Path) -> None:
    train(config, profile=True)
    output = Path(config.output)
    parts = [path.relative_to(output) for path in output.rglob("*") if path.parts[-2] in ("run", "profile")]
    assert Path("profile/trace.json") in parts
    (precious := tmp_path / "precious").mkdir()
    (precious / "trace.json").write_text("text")
    for part in [*parts, Path("experts/loads.json"), Path("tracker.json")]:
        if part.name == "checkpoints":  # may lie on a larger disk: nothing that is there is written
            continue
        shutil.rmtree(output)
        (output / part).parent.mkdir(parents=True)
        (output / part).symlink_to(precious if part.suffix == "" else precious / "trace.json")
        with pytest.raises(EnvironmentProblem, match="is a link to"):
            train(config)
        assert [path.read_text() for path in precious.iterdir()] == ["text"], part
