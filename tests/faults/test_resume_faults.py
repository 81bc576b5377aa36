"""Runs that go on otherwise than they began: other numbers of ranks and loader processes, a killed loader process, a
second run in the same folder. Samples, losses and refusals are held against a run that nothing happened to.

Every row has a short form, which runs with all tests, and a whole one under the marker `faults`, whose figures go to
benchmarks/results/faults_resume.json.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.agents import free_port, no_orphans
from helpers.doomed import TWO, config_in, finished, launched, losses, same_end, samples, tally
from helpers.images import write_folder
from helpers.jobs import VIT
from helpers.rows import Note
from penstock import checkpoint
from penstock.cli import main
from penstock.config.plan import Plan
from penstock.config.run import Augment, RunConfig
from penstock.step import TrainStep

whole = pytest.mark.faults
Stopped = Callable[[str], tuple[RunConfig, RunConfig]]


def moved(config: RunConfig, folder: Path) -> RunConfig:
    """The same run, with all that it has so far, in another folder."""
    shutil.copytree(Path(config.output).parent, folder)
    return replace(config, output=str(folder / "run"), machine=str(folder / "machine.json"))


# -- saved on two ranks, gone on with on other numbers; a batch that cannot be split


@pytest.fixture(scope="module")
def stopped_at_8(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """By kind of sharding: a whole run of 28 steps on two ranks, and one that went no further than its checkpoint of
    step 8. Dropout draws by rank, so it is off. 24 samples a step.
    """

    @cache
    def make(sharding: Any) -> tuple[RunConfig, RunConfig]:
        plan = Plan(micro_batch=12, dp=2, sharding=sharding, optimizer="fused")
        configs = []
        for name in ("undisturbed", "stopped"):
            config = config_in(tmp_path_factory.mktemp(name), plan, steps=28)
            recipe = replace(config.recipe, augment=Augment(label_smoothing=0.1))
            configs.append(replace(config, model=replace(VIT, dropout=0.0, drop_path=0.0), recipe=recipe))
        finished(configs[0], "samples")
        with launched(configs[1], "samples", "kill:0:9", options=(*TWO, "--max-restarts", "0")) as agent:
            assert agent.wait(120) == 128 + signal.SIGKILL, agent.said
        return configs[0], configs[1]

    return make


def as_many_as(procs: int) -> tuple[str, ...]:
    """Options of an agent that goes on with `procs` ranks, whatever the Plan says."""
    endpoint = ("--nnodes", "1:2", "--rdzv", f"127.0.0.1:{free_port()}", "--settle-seconds", "1")
    return ("--procs", str(procs), *endpoint)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sharding", "sizes"),
    [
        pytest.param("fsdp", (1,), id="short", marks=pytest.mark.slow),
        pytest.param("ddp", (1, 2, 3, 4), marks=whole),
        pytest.param("fsdp", (1, 2, 3, 4), marks=whole),
    ],
)
def test_a_run_goes_on_with_any_number_of_ranks(
    note: Note, stopped_at_8: Stopped, tmp_path: Path, sharding: str, sizes: tuple[int, ...]
) -> None:
    undisturbed, stopped = stopped_at_8(sharding)
    expected, deviations = losses(undisturbed), {}
    for size in sizes:
        config = moved(stopped, tmp_path / f"on-{size}")
        options = TWO if size == 2 else as_many_as(size)
        with launched(config, "samples", options=options, forked=len(sizes) == 1) as agent:
            assert agent.wait(240) == 0, agent.said
        assert samples(config) == samples(undisturbed)
        found = losses(config)
        assert len(found) == 28
        if size == 2:
            same_end(config, undisturbed)
        worst = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(found, expected))
        assert worst <= 1e-6, (size, worst)
        deviations[str(size)] = worst
    note(
        f"whole runs saved by {sharding} on 2 ranks and gone on with",
        steps=20, same_samples=True, largest_relative_deviation_by_ranks=deviations,
    )  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "sizes", [pytest.param((5,), marks=pytest.mark.slow), pytest.param((5, 7), marks=whole)]
)
def test_a_batch_that_cannot_be_shared_out_is_refused_before_a_step(
    note: Note, stopped_at_8: Stopped, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    config = moved(stopped_at_8("fsdp")[1], tmp_path / "moved")
    taken, slowest = tally(config), 0.0
    valid = {5: "It can by 1, 2, 3, 4.", 7: "It can by 1, 2, 3, 4, 6."}
    for size in sizes:
        started = time.monotonic()
        options, name = as_many_as(size), f"on-{size}"
        with launched(config, options=options, name=name, forked=len(sizes) == 1) as agent:
            assert agent.wait(300) == 2, agent.said  # seven ranks on a few cores start slowly
        slowest = max(slowest, time.monotonic() - started)
        assert "The global batch of 24 samples" in agent.said
        assert f"cannot be split evenly over {size} ranks" in agent.said
        assert valid[size] in agent.said
        assert tally(config) == taken, "no step was taken"
    found = checkpoint.find(Path(config.output) / "checkpoints")
    assert found is not None
    assert found.step == 8
    note("a batch of 24 that 5 or 7 ranks cannot share", code=2, steps_taken=0, told=valid[7],
         slowest_seconds=slowest)  # fmt: skip


# -- resumed in the middle of an epoch with other loader processes


def reading_with(config: RunConfig, workers: int) -> RunConfig:
    return replace(config, data=replace(config.data, workers=workers))


@pytest.fixture(scope="module")
def epochs(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """An undisturbed run of three epochs and a bit."""
    config = config_in(
        tmp_path_factory.mktemp("epochs"), Plan(micro_batch=64, dp=2, optimizer="fused"), steps=36
    )
    finished(config, "samples")
    return config


def like(config: RunConfig, folder: Path) -> RunConfig:
    """The same run, to be made in another folder."""
    folder.mkdir()
    return config_in(folder, config.plan, steps=config.recipe.steps or 0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kills",
    [pytest.param((2,), id="short", marks=pytest.mark.sweep), pytest.param((0, 1, 2, 1, 0, 2), marks=whole)],
)
def test_no_sample_is_lost_or_repeated_with_any_number_of_loader_processes(
    note: Note, epochs: RunConfig, tmp_path: Path, kills: tuple[int, ...]
) -> None:
    dice, killed = random.Random(len(kills)), like(epochs, tmp_path / "killed")
    for number, workers in enumerate(kills):
        fault = [f"kill:0:{dice.randint(5, 7)}"] * (number + 1)  # those before have struck
        with launched(reading_with(killed, workers), "samples", *fault, options=(*TWO, "--max-restarts", "0"),
                      name=f"log.{number}", forked=len(kills) == 1) as agent:  # fmt: skip
            assert agent.wait(120) == 128 + signal.SIGKILL, agent.said
    for last in range(3) if len(kills) > 1 else (1,):
        config = reading_with(moved(killed, tmp_path / f"last-{last}"), last)
        finished(config, "samples", *fault)
        seen = samples(config)
        assert seen == samples(epochs)
        assert len(seen) == 36
        counts = Counter[int]()
        every = {sample for step in seen for sample in step}
        for step in seen:
            counts.update(step)
            assert max(counts.values()) - min(counts[sample] for sample in every) <= 1, "lost or repeated"
        assert min(counts.values()) >= 3
        same_end(config, epochs)
        no_orphans(tmp_path / f"last-{last}")
    note("resumed mid-epoch with 0, 1 and 2 loader processes", resumes=len(kills) + 2,
         epochs=counts.total() / len(every), samples_lost=0, samples_repeated=0, bit_identical=True)  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.sweep), pytest.param(5, marks=whole)])
def test_a_killed_loader_process_is_named_and_the_run_can_go_on(
    note: Note, epochs: RunConfig, tmp_path: Path, times: int
) -> None:
    folder, slowest, dice = tmp_path / "killed", 0.0, random.Random(times)
    killed = reading_with(like(epochs, folder), 2)
    for number in range(times):
        before = len(tally(killed))
        name = f"log.{number}"
        with launched(killed, "samples", "slow:100", options=TWO, name=name, forked=times == 1) as agent:
            agent.until(lambda before=before: len(tally(killed)) > before, timeout=120)  # type: ignore[misc]
            time.sleep(dice.uniform(0.0, 0.3))
            rank = psutil.Process(int((folder / f"rank.{dice.randrange(2)}").read_text()))
            workers = [one for one in rank.children() if "penstock.data.pool" in " ".join(one.cmdline())]
            assert len(workers) == 2
            os.kill(dice.choice(workers).pid, signal.SIGKILL)
            struck = time.monotonic()
            assert agent.wait(60) == 4, agent.said
        slowest = max(slowest, time.monotonic() - struck)
        assert "was killed by SIGKILL while reading" in agent.said
        no_orphans(folder)
    finished(killed, "samples")
    assert samples(killed) == samples(epochs)
    same_end(killed, epochs)
    note(
        "SIGKILL of a loader process", times=times, code=4, slowest_seconds=slowest, bit_identical_resume=True,
    )  # fmt: skip


# -- two runs in one folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), pytest.param(5, marks=whole)])
def test_a_second_run_in_the_same_folder_is_refused_and_the_first_goes_on(
    note: Note, tmp_path: Path, times: int
) -> None:
    plan = Plan(micro_batch=16, dp=2, optimizer="fused")
    config = config_in(tmp_path, plan, steps=100_000)
    slowest = 0.0
    forked = times == 1
    with launched(config, "slow:100", options=TWO, name="first", forked=forked) as first:
        first.until(lambda: bool(tally(config)), timeout=120)
        for number in range(times):
            started = time.monotonic()
            with launched(config, options=TWO, name=f"second.{number}", forked=forked) as second:
                assert second.wait(60) == 3, second.said
            slowest = max(slowest, time.monotonic() - started)
            assert "is in use by process" in second.said
        pids = {one.pid for one in tally(config)}
        first.send(signal.SIGTERM)
        assert first.wait(60) == 75, first.said
    assert len(pids) == 1, "the first was never disturbed, and the second never took a step"
    no_orphans(tmp_path)
    note("two runs in one folder", times=times, code_of_the_second=3, slowest_refusal_seconds=slowest,
         first_goes_on=True)  # fmt: skip


# -- other images, of the same number


def _replace(file: Path) -> None:
    file.write_bytes(file.with_name("0002.jpg").read_bytes())


CHANGES: dict[str, Callable[[Path], Any]] = {
    "replaced": _replace,
    "renamed": lambda file: file.rename(file.with_name("0001b.jpg")),
    "written again": lambda file: os.utime(file, (1, 1)),
}


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("times", [1, pytest.param(5, marks=whole)])
def test_a_run_does_not_go_on_with_other_images(
    note: Note, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Of as many images as before, so that the number of samples does not say it."""
    images = write_folder(tmp_path / "set", per_class=10, size=16)
    command = [
        "train", "vit-digits", "--data", f"imagefolder:{images}", "--output", f"{tmp_path}/run", "--device", "cpu",
    ]  # fmt: skip
    command += [
        "--recipe.steps=3",
        "--recipe.warmup_steps=0",
        "--checkpoint_every=1",
        "--plan.micro_batch=4",
        "--model.classes=2",
    ]
    command += ["--model.depth=1", "--model.channels=3"]
    step = TrainStep.__call__
    left = iter([True, False])

    def cut(self: TrainStep, batches: Any) -> Any:
        if not next(left):
            raise KeyboardInterrupt
        return step(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", cut)
        assert main(command) == 130
    refused = 0
    for number in range(times):
        for change in CHANGES.values() if times > 1 else [_replace]:
            shutil.copytree(images, tmp_path / "kept")  # with times of change
            change(images / ("cat", "dog")[number % 2] / "0001.jpg")
            refused += main(command) == 4
            assert (
                "changed since the position was saved: a file was replaced, renamed"
                in capsys.readouterr().err
            )
            shutil.rmtree(images)
            (tmp_path / "kept").rename(images)
    assert refused == (times * len(CHANGES) if times > 1 else 1)
    assert main(command) == 0
    note("images replaced, renamed or written again between stop and resume", tried=refused, refused=refused,
         resumed_with_the_old_ones=True)  # fmt: skip
