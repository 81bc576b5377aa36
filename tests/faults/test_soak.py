"""A run that is hit again and again: it gets on as far as its faults allow, and nothing piles up.

What a fault must cost is measured beside it: starting two ranks anew, and the watchdog's patience where one hangs. The
rest of the time belongs to steps; of those that an undisturbed run takes in it, 95 % must be there at the end, so that
noticing a fault, ending what is left, and doing again the steps since the last checkpoint may cost the rest.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pytest

from helpers.agents import Agent, no_orphans
from helpers.doomed import PLANS, TWO, Tally, config_in, launched, tally
from helpers.rows import Note
from penstock import checkpoint
from penstock.config.run import RunConfig

KINDS = ("flip", "nan", "stop", "kill", "raise")
HANG_SECONDS = 2.0
# A step sleeps, so that the undisturbed rate is not that of whatever else this machine does.
OPTIONS = (*TWO, "--hang-seconds", str(HANG_SECONDS), "--max-restarts", "1000")
SLOW = "slow:250"


def run_in(folder: Path) -> RunConfig:
    folder.mkdir()
    return config_in(folder, PLANS["ddp"], steps=1_000_000, checkpoint_every=2, log_every=4)


@dataclass
class Undisturbed:
    """What a run does that nothing happens to."""

    starts: list[float] = field(default_factory=list)
    """Seconds from starting the agent to the end of the first step."""
    step_seconds: list[float] = field(default_factory=list)
    """Mean over some time, saves included."""

    def measure(self, folder: Path, seconds: float) -> None:
        config = run_in(folder)
        started = time.time()
        with launched(config, "heed", SLOW, options=OPTIONS, forked=False) as agent:
            agent.until(lambda: bool(tally(config)), timeout=120)
            time.sleep(seconds)
            agent.send(signal.SIGTERM)
            assert agent.wait(60) == 75, agent.said
        taken = tally(config)
        self.starts.append(taken[0].seconds - started)
        if seconds > 5:
            self.step_seconds.append((taken[-1].seconds - taken[0].seconds) / (len(taken) - 1))


@dataclass(frozen=True)
class Burden:
    """What the agent and its ranks hold."""

    agent_bytes: int
    agent_handles: int
    rank_bytes: int
    rank_handles: int
    processes: int


def burden(agent: int, folder: Path) -> Burden:
    ranks = [psutil.Process(int((folder / f"rank.{rank}").read_text())) for rank in (0, 1)]
    supervisor = psutil.Process(agent)
    return Burden(
        agent_bytes=supervisor.memory_info().rss,
        agent_handles=supervisor.num_fds(),
        rank_bytes=sum(rank.memory_info().rss for rank in ranks),
        rank_handles=sum(rank.num_fds() for rank in ranks),
        processes=len(supervisor.children(recursive=True)),
    )


def settled(agent: int, folder: Path) -> Burden:
    """`burden` once both ranks are there: a busy machine may not have started them again yet."""
    end = time.monotonic() + 60
    while True:
        try:
            return burden(agent, folder)
        except psutil.NoSuchProcess:
            assert time.monotonic() < end, "no rank is started again"
            time.sleep(0.05)


def strike(kind: str, rank: int, config: RunConfig) -> float:
    """When."""
    folder = Path(config.output).parent
    pid = int((folder / f"rank.{rank}").read_text())
    if kind == "stop":
        os.kill(pid, signal.SIGSTOP)
    elif kind in ("kill", "flip"):
        if kind == "flip":
            damage(quiet_checkpoint(config))
        os.kill(pid, signal.SIGKILL)
    else:
        note = folder / f"order.{rank}.new"
        note.write_text(kind)
        note.replace(folder / f"order.{rank}")
    return time.time()


def quiet_checkpoint(config: RunConfig) -> Path:
    """A file of the newest checkpoint, which has been verified, and none is being made."""
    saved = Path(config.output) / "checkpoints"
    while not (newest := checkpoint.steps(saved)) or tally(config)[-1].step - newest[-1] != 1:
        time.sleep(0.01)
    return min((saved / f"step-{newest[-1]}").glob("optimizer*.safetensors"))


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


@dataclass
class Soaked:
    """What happened in the end."""

    seconds: float = 0.0
    steps: int = 0
    kinds: list[str] = field(default_factory=list)
    away: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    """Seconds from each fault to the next step, of the next life where there is one."""
    burdens: list[Burden] = field(default_factory=list)
    """Just before each fault."""


def soak(config: RunConfig, agent: Agent, seconds: float, every: float) -> Soaked:
    """Strike `every` so many seconds."""
    dice, found, folder = random.Random(1), Soaked(), Path(config.output).parent
    begun, first = time.monotonic(), tally(config)[-1].step
    while (next_at := (len(found.kinds) + 1) * every) < seconds:
        time.sleep(max(0.0, begun + next_at - time.monotonic()))
        found.burdens.append(settled(agent.process.pid, folder))
        kind = KINDS[len(found.kinds) % len(KINDS)]
        found.kinds.append(kind)
        before = tally(config)[-1]
        struck = strike(kind, dice.randrange(2), config)
        agent.until(partial(_goes_on, config, before, kind), timeout=120)
        found.away[kind].append(tally(config)[-1].seconds - struck)
    time.sleep(max(0.0, begun + seconds - time.monotonic()))
    found.seconds, found.steps = time.monotonic() - begun, tally(config)[-1].step - first
    return found


def _goes_on(config: RunConfig, before: Tally, kind: str) -> bool:
    latest = tally(config)[-1]
    return latest.step > before.step + 1 if kind == "nan" else latest.pid != before.pid


def lives_of(taken: list[Tally]) -> int:
    return len({one.pid for one in taken})


@pytest.mark.sweep
@pytest.mark.timeout(2400)
def test_a_run_that_is_hit_again_and_again_goes_on_and_holds_no_more_than_before(tmp_path: Path) -> None:
    found, _ = soaked(tmp_path / "soak", seconds=16.0, every=4.0)
    assert found.kinds == ["flip", "nan", "stop"]
    assert found.steps > 0
    held(found)


@pytest.mark.faults
@pytest.mark.timeout(2400)
def test_twenty_minutes_with_a_fault_every_thirty_seconds(note: Note, tmp_path: Path) -> None:
    undisturbed = Undisturbed()
    for number, seconds in enumerate((60.0, 1.0, 1.0)):
        undisturbed.measure(tmp_path / f"before-{number}", seconds)
    found, config = soaked(tmp_path / "soak", seconds=1200.0, every=30.0)
    for number, seconds in enumerate((60.0, 1.0, 1.0)):
        undisturbed.measure(tmp_path / f"after-{number}", seconds)

    start, rate = statistics.median(undisturbed.starts), 1 / statistics.fmean(undisturbed.step_seconds)
    restarts = lives_of(tally(config)) - 1
    granted = restarts * start + found.kinds.count("stop") * HANG_SECONDS
    share = found.steps / ((found.seconds - granted) * rate)
    figures = {
        "seconds": round(found.seconds),
        "faults": {kind: found.kinds.count(kind) for kind in KINDS},
        "steps": found.steps,
        "steps_per_second_undisturbed": rate,
        "seconds_to_start_undisturbed": start,
        "seconds_from_fault_to_next_step": {k: statistics.median(v) for k, v in found.away.items() if v},
        "share_of_expected_steps": share,
        "share_of_steps_without_faults": found.steps / (found.seconds * rate),
        **held(found),
    }
    assert share >= 0.95, (figures, undisturbed)
    note("20 minutes with a fault every 30 seconds", **figures)


def soaked(folder: Path, *, seconds: float, every: float) -> tuple[Soaked, RunConfig]:
    """A run that was soaked and then asked to stop, with nothing lost and nothing left."""
    config = run_in(folder)
    checkpoints = Path(config.output) / "checkpoints"
    with launched(config, "heed", SLOW, options=OPTIONS, forked=False) as agent:
        agent.until(lambda: bool(tally(config)), timeout=120)
        found = soak(config, agent, seconds, every)
        last = tally(config)[-1].step
        agent.send(signal.SIGTERM)
        assert agent.wait(60) == 75, agent.said
    no_orphans(folder)
    restarts = len(found.kinds) - found.kinds.count("nan")
    assert lives_of(tally(config)) == restarts + 1, agent.said
    stored = checkpoint.find(checkpoints)
    assert stored is not None
    assert stored.step >= last
    assert len(list(checkpoints.glob("*.refused"))) == found.kinds.count("flip")
    assert not list(checkpoints.glob("*.tmp"))
    return found, config


def held(found: Soaked) -> dict[str, str]:
    """Hold that as much is held late as early; in words."""
    words = {}
    third = max(1, len(found.burdens) // 3)
    early, late = found.burdens[:third], found.burdens[-third:]
    slack = {
        "agent_bytes": 1.05, "rank_bytes": 1.05, "agent_handles": 1.0, "rank_handles": 1.0, "processes": 1.0,
    }  # fmt: skip
    for name, factor in slack.items():
        # Not the most: a look may fall into a save, which holds a file more for a moment. What piles up lifts them all.
        before, after = (
            round(statistics.median(getattr(one, name) for one in part)) for part in (early, late)
        )
        assert after <= before * factor, (name, found.burdens)
        words[f"{name}_early_and_late"] = f"{before:,} and {after:,}"
    return words
