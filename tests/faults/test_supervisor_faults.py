"""What kills, hangs, signals, exceptions and poisoned gradients do to a run under `penstock launch`: rows of the table.

Every row has a short form, which runs with all tests, and a whole one under the marker `faults`, whose figures go to
benchmarks/results/faults_supervisor.json. Dropout is on throughout.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.agents import free_port, no_orphans
from helpers.doomed import PLANS, STEPS, TWO, config_in, finished, launched, losses, poison, same_end, tally
from helpers.jobs import JOBS
from helpers.rows import Note
from helpers.spawn import RankFailed, spawn
from helpers.sweeps import sweep
from penstock import checkpoint
from penstock.config.load import dump_toml
from penstock.config.plan import Plan
from penstock.config.run import RunConfig
from penstock.errors import NumericError
from penstock.shards import whole_of
from penstock.train.metrics import read_metrics

whole = pytest.mark.faults


@pytest.fixture(scope="module", params=["ddp", pytest.param("fsdp", marks=pytest.mark.sweep)])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    config = config_in(tmp_path_factory.mktemp(request.param), PLANS[request.param])
    finished(config)
    assert len(losses(config)) == STEPS
    return config


# -- SIGKILL of a random rank at a random step


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [pytest.param(1, marks=pytest.mark.slow), pytest.param(20, marks=whole)])
def test_kills_of_random_ranks_change_no_bit(
    note: Note, undisturbed: RunConfig, tmp_path: Path, kills: int
) -> None:
    dice = random.Random(kills)
    config = config_in(tmp_path, undisturbed.plan)
    faults = [f"kill:{dice.randrange(2)}:{dice.randint(1, 6)}" for _ in range(kills)]
    options = (*TWO, "--max-restarts", str(kills))
    with launched(config, *faults, options=options, forked=kills == 1) as agent:
        assert agent.wait(60 * (kills + 1)) == 0, agent.said
    assert len(list((tmp_path / "struck").iterdir())) == kills
    assert agent.said.count("was killed by SIGKILL") == kills
    lives = [list(life) for _, life in groupby(tally(config), key=lambda taken: taken.pid)]
    assert len(lives) == kills + 1
    slowest = max(after[0].seconds - before[-1].seconds for before, after in pairwise(lives))
    assert slowest < 60
    same_end(config, undisturbed)
    no_orphans(tmp_path)
    name = undisturbed.plan.sharding
    note(
        f"SIGKILL of a random rank, {name}",
        kills=kills,
        bit_identical=True,
        slowest_seconds_to_the_next_step=slowest,
    )


@pytest.mark.parametrize("job", sweep([name for name in JOBS if name != "vit"], ()))
def test_a_killed_rank_of_any_family_changes_no_bit(tmp_path: Path, job: str) -> None:
    """The agent, which ends the other rank and starts both again, knows no families; here the two are started anew."""
    configs = []
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
        configs.append(config_in(tmp_path / name, PLANS["ddp"], steps=12, job=job))
    calm, killed = configs
    finished(calm)
    with pytest.raises(RankFailed, match="It was killed by SIGKILL"):
        finished(killed, "kill:1:6")
    finished(killed, "kill:1:6")
    assert len(list((tmp_path / "killed" / "struck").iterdir())) == 1
    same_end(killed, calm)


# -- SIGTERM and SIGUSR1 at random times, a second one during the save


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stops", [pytest.param(2, marks=pytest.mark.sweep), pytest.param(20, marks=whole)])
def test_being_stopped_at_random_times_changes_no_bit(
    note: Note, undisturbed: RunConfig, tmp_path: Path, stops: int
) -> None:
    if undisturbed.plan.sharding == "fsdp" and stops == 2:
        pytest.skip("the whole suite stops sharded runs too")
    dice = random.Random(stops)
    config = config_in(tmp_path, undisturbed.plan)
    folder, slowest, during = Path(config.output) / "checkpoints", 0.0, 0
    for number in range(stops):
        known = checkpoint.steps(folder)
        name = f"log.{number}"
        with launched(config, "slow:150", "slowsync:30", options=TWO, name=name, forked=stops == 2) as agent:
            agent.until(lambda agent=agent: "predicted:" in agent.said, timeout=120)  # type: ignore[misc]
            time.sleep(dice.uniform(0.0, 1.2))
            first, second = dice.sample([signal.SIGTERM, signal.SIGUSR1], 2)
            agent.send(first)
            asked = time.monotonic()
            end = asked + 10
            while agent.process.poll() is None and not list(folder.glob("*.tmp")) and time.monotonic() < end:
                time.sleep(0.002)
            if agent.process.poll() is None:
                during += bool(list(folder.glob("*.tmp")))
                agent.send(second)
            code = agent.wait()
        if code == 0:
            break  # it had come to its end
        assert code == 75, agent.said
        slowest = max(slowest, time.monotonic() - asked)
        newest = checkpoint.steps(folder)[-1] if checkpoint.steps(folder) else 0
        assert newest >= max(known, default=0)
        assert checkpoint.find(folder) is not None or newest == 0
        no_orphans(tmp_path)
    assert slowest < 25
    assert during, "no second signal fell into a save"
    finished(config)
    same_end(config, undisturbed)
    name = undisturbed.plan.sharding
    note(f"SIGTERM and SIGUSR1, {name}", stops=stops, second_during_a_save=during, code=75,
         slowest_seconds=slowest, bit_identical=True)  # fmt: skip


# -- one rank hangs, raises; the supervisor is killed


@pytest.mark.slow
def test_an_evaluation_that_stands_still_is_ended_by_the_rank_that_waits(tmp_path: Path) -> None:
    """The watchdog is off: it would act first."""
    config = config_in(tmp_path, PLANS["ddp"], steps=8, wait_seconds=5.0)
    with launched(config, "still:1", options=(*TWO, "--hang-seconds", "0")) as agent:
        assert agent.wait(120) == 0, agent.said
    assert (tmp_path / "struck" / "still").exists()
    assert "rank 0 ended with code 8:\nRank 0 waited 5 s for another rank" in agent.said
    assert "go > _evaluate > evaluate > " in agent.said
    assert "restarted from the newest checkpoint" in agent.said
    no_orphans(tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), pytest.param(5, marks=whole)])
def test_a_stopped_rank_is_named_with_its_stack_and_the_run_goes_on(
    note: Note, tmp_path: Path, times: int
) -> None:
    dice, slowest, timeout = random.Random(times), 0.0, 4.0
    for number in range(times):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = config_in(folder, PLANS["ddp"], steps=12)
        rank = dice.randrange(2)
        options = (*TWO, "--hang-seconds", str(timeout), "--max-restarts", "0")
        fault = f"stop:{rank}:{dice.randint(1, 9)}"
        with launched(config, fault, options=options, forked=times == 1) as agent:
            agent.until(lambda folder=folder: (folder / "struck" / "0").exists(), timeout=120)  # type: ignore[misc]
            struck = time.monotonic()
            assert agent.wait() == 8, agent.said
        slowest = max(slowest, time.monotonic() - struck)
        assert slowest < timeout + 10
        assert f"rank {rank} hangs:" in agent.said
        assert agent.said.index("in _strike") < agent.said.index(f"Stack of rank {1 - rank}")
        no_orphans(folder)
        finished(config, f"stop:{rank}:1")
    note("SIGSTOP of a rank", times=times, code=8, timeout_seconds=timeout, slowest_seconds=slowest)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [1, pytest.param(5, marks=whole)])
def test_an_exception_on_one_rank_is_told_first(note: Note, tmp_path: Path, times: int) -> None:
    for number in range(times):
        (folder := tmp_path / str(number)).mkdir()
        config = config_in(folder, PLANS["ddp"], steps=12)
        with launched(config, "raise:1:3", options=(*TWO, "--max-restarts", "0")) as agent:
            assert agent.wait(120) == 1
        said = agent.said
        assert said.index("rank 1 ended with code 1:\nTraceback") < said.index("rank 0 then lost it.")
        assert "ValueError: only on rank 1" in said
        no_orphans(folder)
    note("exception on rank 1 only", times=5, its_traceback_first=True, orphans_after_10_seconds=0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), pytest.param(5, marks=whole)])
def test_a_killed_supervisor_leaves_nothing_and_costs_no_bit(note: Note, tmp_path: Path, times: int) -> None:
    dice = random.Random(times)
    reference = config_in(tmp_path, PLANS["ddp"], steps=16)
    (tmp_path / "again").mkdir()
    config = config_in(tmp_path / "again", PLANS["ddp"], steps=16)
    slowest = 0.0
    for number in range(times):
        name = f"log.{number}"
        with launched(config, "slow:100", options=TWO, name=name, forked=times == 1) as agent:
            agent.until(lambda agent=agent: "predicted:" in agent.said, timeout=120)  # type: ignore[misc]
            time.sleep(dice.uniform(0.0, 0.6))
            agent.send(signal.SIGKILL)
            assert agent.wait() == -9
        killed = time.monotonic()
        no_orphans(tmp_path / "again")
        slowest = max(slowest, time.monotonic() - killed)
    for each in (config, reference):
        finished(each)
    same_end(config, reference)
    note("SIGKILL of the supervisor", times=times, orphans_after_10_seconds=0, slowest_seconds=slowest,
         bit_identical=True)  # fmt: skip


# -- a node is lost


@whole
@pytest.mark.timeout(600)
def test_a_lost_node_is_gone_on_without(note: Note, tmp_path: Path) -> None:
    config = config_in(tmp_path, PLANS["ddp"], steps=200)
    common = (
        *("--procs", "1", "--nnodes", "1:2", "--rdzv", f"127.0.0.1:{free_port()}"),
        *("--settle-seconds", "5", "--lost-seconds", "4"),
    )
    a = launched(config, "slow:50", options=(*common, "--node-rank", "0"), name="a", forked=False)
    b = launched(config, "slow:50", options=(*common, "--node-rank", "1"), name="b", forked=False)
    folder = Path(config.output) / "checkpoints"
    with a, b:
        a.until(lambda: bool(checkpoint.steps(folder)), timeout=120)
        b.send(signal.SIGKILL)
        killed, known = time.monotonic(), checkpoint.steps(folder)[-1]
        a.until(lambda: checkpoint.steps(folder)[-1] > known + 8, timeout=120)
        took = time.monotonic() - killed
        a.send(signal.SIGTERM)
        assert a.wait(60) == 75, a.said
    assert "1 ranks are there instead of 2: plan.dp=1" in a.said
    no_orphans(tmp_path)
    note("a node is lost", nodes="1:2", went_on_with_ranks=1, seconds_until_going_on=took)


# -- NaN or Inf in one rank's gradient; a scaler fed Inf for ever


def _poisoned(
    text: str, first: int, count: int, value: float
) -> tuple[list[list[float]], list[float | None], str]:
    """Weights after each step, the losses logged, and how it ended, on one rank."""
    import tomllib

    from penstock.config.load import from_dict
    from penstock.train import loop

    run: Any = loop._Run
    if os.environ["RANK"] == "1":
        poison(first, count, value)
    original, seen = run._train_step, []

    def step(self: Any) -> None:
        original(self)
        flat = [whole_of(p.detach()).flatten() for p in self.built.model.parameters()]
        seen.append(torch.cat(flat)[::37].tolist())

    run._train_step = step
    config = from_dict(RunConfig, tomllib.loads(text), origin="the test")
    try:
        loop.train(config)
        ended = "done"
    except NumericError as error:
        ended = str(error)
    found = read_metrics(Path(config.output) / "metrics.jsonl")
    return seen, [loss for row in found if row["event"] == "steps" for loss in row["losses"]], ended


@pytest.mark.parametrize(
    ("sharding", "optimizer", "value"),
    [
        ("ddp", "fused", "nan"),
        ("fsdp", "loop", "inf"),
        *[
            pytest.param(s, o, v, marks=whole)
            for s in ("ddp", "fsdp")
            for o in ("loop", "foreach", "fused", "contiguous")
            for v in ("nan", "inf")
            if (s, o) != ("fsdp", "contiguous")
        ],
    ],
)
def test_all_ranks_skip_a_step_that_one_rank_poisons(
    tmp_path: Path, sharding: Any, optimizer: Any, value: str
) -> None:
    plan = Plan(micro_batch=16, dp=2, sharding=sharding, optimizer=optimizer)
    config = config_in(tmp_path, plan, steps=8)
    zero, one = spawn(_poisoned, 2, dump_toml(config), 4, 1, float(value), group=False, timeout=120)
    assert zero == one, "ranks agree in all they have"
    weights, logged, ended = zero
    assert ended == "done"
    changed = [before != after for before, after in pairwise(weights)]
    assert changed == [True, True, False, True, True, True, True], "the fourth step alone changes nothing"
    assert len(logged) == 8
    skipped = [row for row in read_metrics(Path(config.output) / "metrics.jsonl") if row.get("skipped")]
    assert [(row["step"], row["skipped"]) for row in skipped] == [(4, 1)]


def test_three_poisoned_steps_in_a_row_end_the_run_and_name_the_layer(tmp_path: Path) -> None:
    config = config_in(tmp_path, PLANS["ddp"], steps=40)
    zero, one = spawn(_poisoned, 2, dump_toml(config), 5, 40, float("nan"), group=False, timeout=120)
    for weights, _, ended in (zero, one):
        assert "By step 8, 3 steps in a row" in ended
        assert "In the latest batch of rank 1 the overflow begins in the" in ended
        assert weights[3] == weights[-1], "the weights are those of before"
    assert checkpoint.steps(Path(config.output) / "checkpoints") == [4]


def test_a_scaler_fed_inf_for_ever_stops_at_its_floor(tmp_path: Path) -> None:
    plan = Plan(micro_batch=4, dp=2, precision="O1", dtype="fp16", optimizer="fused")
    config = config_in(tmp_path, plan, steps=60)
    zero, one = spawn(_poisoned, 2, dump_toml(config), 3, 60, float("inf"), group=False, timeout=240)
    for weights, _, ended in (zero, one):
        assert "the loss scale has fallen to 1 " in ended
        assert "In the latest batch of rank 1 the overflow begins in the" in ended
        assert len(weights) < 50
        assert weights[1] == weights[-1]


@whole
def test_the_rows_of_numbers(note: Note, tmp_path: Path) -> None:
    """The figures of the rows above, once they hold."""
    config = config_in(tmp_path, replace(PLANS["ddp"], precision="O1", dtype="fp16", micro_batch=4), steps=60)
    seen, _, _ = spawn(_poisoned, 2, dump_toml(config), 3, 60, float("inf"), group=False, timeout=240)[0]
    note("a scaler fed Inf for ever", stopped_after_steps=len(seen) - 2, code=6, names_the_layer=True)
    note("NaN or Inf in one rank's gradient", plans=14, skipped_on_all_ranks=True, weights_unchanged=True)
