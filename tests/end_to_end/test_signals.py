"""Being asked to stop, at any moment from the first import to the last flush: the run saves and asks for a requeue
(75), or ends as it was about to (0). Nothing dies of it, and what is left resumes.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.jobs import words
from helpers.rows import record
from helpers.spawn import QUIET
from helpers.sweeps import sweep
from helpers.toy import desk
from penstock import checkpoint
from penstock.launch.signals import STOPS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="caught signals are read from /proc")

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "faults_signals.json"
STEPS = 12
RECIPE = f"--recipe.steps {STEPS} --recipe.warmup_steps 1 --log_every 2 --checkpoint_every 3"
FORMS = {"alone": ["train"], "two ranks": ["launch", "--procs", "2", "--", "--plan.dp", "2"]}


class Run:
    """`penstock train`, or `penstock launch`, as a process of its own."""

    def __init__(self, form: str, output: Path, job: str = "vit") -> None:
        output.mkdir(parents=True, exist_ok=True)
        self.output, self.log = output, output / "log"
        options = [*words(job, output / "texts"), *RECIPE.split(), "--output", str(output / "run")]
        options += ["--machine", desk(output)]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock", *FORMS[form], *options],
                stdout=out, stderr=out, stdin=subprocess.DEVNULL, env={**os.environ, **QUIET},
                start_new_session=True,
            )  # fmt: skip

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end
            time.sleep(0.001)

    def listens(self) -> bool:
        """Whether it catches SIGTERM already."""
        words = Path(f"/proc/{self.process.pid}/status").read_text().split()
        return bool(int(words[words.index("SigCgt:") + 1], 16) >> (signal.SIGTERM - 1) & 1)

    def trained(self) -> bool:
        metrics = self.output / "run" / "metrics.jsonl"
        return metrics.exists() and '"steps"' in metrics.read_text()

    def done(self) -> bool:
        return "weights in" in self.log.read_text()

    def shower(self, every: float = 0.02) -> None:
        """Ask it again and again, both ways, until it has ended."""
        for number in itertools.cycle(STOPS):
            if self.process.poll() is not None:
                return
            self.process.send_signal(number)
            time.sleep(every)

    def end(self) -> int:
        return self.process.wait(timeout=120)


def finish(form: str, output: Path, job: str = "vit") -> None:
    """The same command goes on to the end."""
    run = Run(form, output, job)
    assert run.end() == 0, run.log.read_text()
    assert checkpoint.steps(output / "run" / "checkpoints")[-1] == STEPS


@pytest.mark.parametrize("form", sweep(FORMS, ["two ranks"]))
def test_a_shower_of_signals_from_the_first_import_on_asks_for_a_requeue(tmp_path: Path, form: str) -> None:
    run = Run(form, tmp_path)
    run.until(run.listens)
    assert "libtorch" not in Path(f"/proc/{run.process.pid}/maps").read_text(), (
        "it listens before it imports torch"
    )
    run.shower()
    assert run.end() == 75, run.log.read_text()


@pytest.mark.parametrize(("form", "job"), [*((form, "vit") for form in FORMS), ("alone", "encoder-decoder")])
@pytest.mark.sweep
def test_a_shower_during_training_saves_once_and_ends_in_75_to_the_last(
    tmp_path: Path, form: str, job: str
) -> None:
    run = Run(form, tmp_path, job)
    run.until(run.trained)
    run.shower()
    code = run.end()
    if not run.done():  # a run this short may have been at its end
        assert code == 75, run.log.read_text()
        assert "is saved in" in run.log.read_text()
    finish(form, tmp_path, job)


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
def test_a_shower_after_the_last_word_changes_nothing(tmp_path: Path, form: str) -> None:
    run = Run(form, tmp_path)
    run.until(run.done)
    run.shower(every=0.0005)
    assert run.end() == 0, run.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("form", sweep(FORMS, ["two ranks"]))
def test_ctrl_c_in_a_terminal_saves_on_all_ranks(tmp_path: Path, form: str) -> None:
    """A terminal sends it to every process of its foreground, the agent and its ranks."""
    run = Run(form, tmp_path)
    run.until(run.trained)
    os.killpg(run.process.pid, signal.SIGINT)
    code = run.end()
    if not run.done():
        assert code == 130, run.log.read_text()
        assert "Stopped by Ctrl-C after step" in run.log.read_text()
    finish(form, tmp_path)


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("form", "every"), [("alone", 0.1), ("two ranks", 0.2)])
def test_one_or_two_signals_at_every_moment(tmp_path: Path, form: str, every: float) -> None:
    start = time.monotonic()
    assert Run(form, tmp_path / "undisturbed").end() == 0
    life, codes, resumed = time.monotonic() - start, Counter[int](), 0
    for count in range(int(life / every) + 2):
        run = Run(form, tmp_path / str(count))
        run.until(run.listens)
        time.sleep(count * every)
        for pause in (0.03,) * (1 + count % 2):
            if run.process.poll() is None:
                run.process.send_signal(STOPS[count % 3 == 0])
                time.sleep(pause)
        code = run.end()
        assert code in (0, 75), f"after {count * every:.2f} s: {code}\n{run.log.read_text()}"
        codes[code] += 1
        if count % 10 == 0:
            finish(form, tmp_path / str(count))
            resumed += 1
    assert set(codes) == {0, 75}, codes
    record(
        RESULTS, f"one or two signals at every moment of a run, {form}", {"runs": codes.total(),
        "seconds between moments": every, "saved and asked for a requeue (75)": codes[75],
        "ended as they were about to (0)": codes[0], "gone on to the end": resumed},
        command="make test-faults PYTEST=tests/end_to_end/test_signals.py",
    )  # fmt: skip
