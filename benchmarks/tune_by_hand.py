"""What `penstock tune` chooses for three scripts, beside all that a skilled user would try by hand.

    python benchmarks/tune_by_hand.py --output benchmarks/results/tune_by_hand_cpu.json

The scripts are a plain loop, one as nanoGPT's and one with transformers' Trainer, those of tests/tune/scripts in sizes
that keep a CPU busy. A version by hand is the script with the edits, options or environment that turn a setting on; it
runs in plain python, without Penstock. First every combination of settings has a short look, then `penstock tune`
chooses, and then the fastest versions by hand, the first two of them also with an allocator that keeps memory, take
turns with the script as it is and with its choice. Batches are the same in all of them. Takes about 18 minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "tests" / "tune" / "scripts"
ENDLESS = 1_000_000
AS_IT_IS, TUNED = "as it is", "penstock tune"
WARM_UP, UNEVEN = 8, 1.5
"""Most steps before a version is timed: it is warm once two successive ones differ by no more than half."""
HOPELESS = 1.6
"""A version that takes this many times the best so far is not looked at further."""

Edits = tuple[tuple[str, str], ...]
"""Pieces of a script's text, each of which it has once, and what stands there instead."""


@dataclass(frozen=True)
class Change:
    """How a user turns a setting on."""

    edits: Edits = ()
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    """A script in the size that is measured, and the settings that its user would try, by name."""

    script: str
    arguments: tuple[str, ...]
    by_hand: dict[str, Change]
    size: Edits = ()

    def combinations(self) -> Iterator[tuple[str, ...]]:
        """All sets of settings but those that are the same twice: autocast leaves no product in fp32 to be fast."""
        for chosen in itertools.product((False, True), repeat=len(self.by_hand)):
            names = tuple(name for name, on in zip(self.by_hand, chosen, strict=True) if on)
            if not {"autocast", "fast products"} <= {*names}:
                yield names

    def text(self, settings: tuple[str, ...] = ()) -> str:
        """The script's text with some settings turned on. Raises ValueError for an edit that does not fit it."""
        text = (SCRIPTS / self.script).read_text(encoding="utf-8")
        for old, new in (*self.size, *(edit for name in settings for edit in self.by_hand[name].edits)):
            if text.count(old) != 1:
                raise ValueError(f"{self.script} has {old!r} {text.count(old)} times, and not once.")
            text = text.replace(old, new)
        return text


_PRODUCTS = Change(
    edits=(("import torch\n", "import torch\n\ntorch.set_float32_matmul_precision('medium')\n"),)
)
KEPT_MEMORY = Change(
    environment={"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
)
SUBJECTS = {
    "plain loop": Subject(
        script="plain.py",
        arguments=(str(ENDLESS),),
        size=(
            ("torch.randn(256, 16)", "torch.randn(4096, 512)"),
            ("batch_size=32", "batch_size=128"),
            (
                "nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)",
                "nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2)",
            ),
        ),
        by_hand={
            "fused optimizer": Change(edits=(("lr=1e-3)", "lr=1e-3, fused=True)"),)),
            "autocast": Change(
                edits=(
                    (
                        "        loss = loss_function(model(inputs), labels)\n",
                        "        with torch.autocast('cpu', torch.bfloat16):\n"
                        "            loss = loss_function(model(inputs), labels)\n",
                    ),
                )
            ),
            "fast products": _PRODUCTS,
            "compiled": Change(
                edits=(("loss_function = ", "model = torch.compile(model)\nloss_function = "),)
            ),
        },
    ),
    "nanoGPT": Subject(
        script="nanogpt.py",
        arguments=(
            f"--max_iters={ENDLESS}",
            "--n_layer=3",
            "--n_head=4",
            "--n_embd=256",
            "--block_size=128",
        ),
        # It evaluates before the first step, for which torch.compile makes code of its own.
        size=(("if iter_num % eval_interval == 0:", "if iter_num and iter_num % eval_interval == 0:"),),
        by_hand={
            "fused optimizer": Change(edits=(("betas=betas)", "betas=betas, fused=True)"),)),
            "autocast": Change(arguments=("--dtype=bfloat16",)),
            "fast products": _PRODUCTS,
            "compiled": Change(arguments=("--compile=True",)),
        },
    ),
    "Trainer": Subject(
        script="run_glue.py",
        arguments=("--max_steps", str(ENDLESS), "--output_dir", "OUT", "--hidden_size", "256", "--use_cpu"),
        size=(
            ("torch.randint(4, 32, (256,))", "torch.randint(8, 128, (256,))"),
            ("num_hidden_layers=2, num_attention_heads=2", "num_hidden_layers=3, num_attention_heads=4"),
            (
                "intermediate_size=64, max_position_embeddings=32",
                "intermediate_size=1024, max_position_embeddings=128",
            ),
        ),
        by_hand={  # its optimizer is fused by default
            "autocast": Change(arguments=("--bf16",)),
            "fast products": _PRODUCTS,
            "compiled": Change(arguments=("--torch_compile",)),
        },
    ),
}


# -- in the script's process


def take_turns(commands: int, answers: int) -> None:
    """Let an optimizer's steps come by turns: a line with a number on the file `commands` asks for as many, and their
    seconds are written to `answers`."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    asked, told = os.fdopen(commands), os.fdopen(answers, "w")
    left, start = 1, time.perf_counter()

    def stepped(*_: Any) -> None:
        nonlocal left, start
        left -= 1
        if left == 0:
            print(time.perf_counter() - start, file=told, flush=True)
            line = asked.readline()
            if not line:
                os._exit(0)
            left, start = int(line), time.perf_counter()

    register_optimizer_step_post_hook(stepped)


def serve(commands: int, answers: int, words: list[str]) -> None:
    """Run a script, or the words of `penstock run`, whose steps come by turns."""
    if words[0] == "run":
        from penstock.cli import main
        from penstock.cli._script import when_imported

        # The command sets what torch reads of the environment while it is imported.
        with when_imported("torch", lambda: take_turns(commands, answers)):
            raise SystemExit(main(words))
    take_turns(commands, answers)
    sys.argv[:] = words
    sys.path[0] = str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")


# -- in the process that times them


class Version:
    """A process of a script, whose steps come by turns. Not to be used after `end`."""

    def __init__(self, words: list[str], environment: dict[str, str], log: Path) -> None:
        commands, self._asking = os.pipe()
        self._hearing, answers = os.pipe()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--serve", str(commands), str(answers), "--", *words],
                pass_fds=(commands, answers), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env={**os.environ, "WANDB_MODE": "disabled", **environment}, cwd=log.parent,
            )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._answers, self._log = os.fdopen(self._hearing), log
        try:
            steps = [self._heard()]
            while len(steps) < 3 or (len(steps) < WARM_UP and max(steps[-2:]) > UNEVEN * min(steps[-2:])):
                steps.append(self.turn(1))
        except BaseException:
            self.end()
            raise
        self.step = min(steps[-2:])
        """Seconds of a step, as far as warming up tells."""

    def turn(self, steps: int) -> float:
        """Seconds per step of so many."""
        os.write(self._asking, f"{steps}\n".encode())
        return self._heard() / steps

    def end(self) -> None:
        """Let the process go."""
        os.close(self._asking)
        self._process.terminate()
        self._process.wait()
        self._answers.close()

    def _heard(self) -> float:
        line = self._answers.readline()
        if not line:
            said = self._log.read_text(encoding="utf-8", errors="replace")[-1500:]
            raise RuntimeError(f"A version of a script ended with {self._process.wait()}:\n{said}")
        return float(line)


def _turns(seconds: float, step: float) -> int:
    return max(1, math.ceil(seconds / step))


def looked(
    start: Callable[[tuple[str, ...]], Version], subject: Subject, seconds: float
) -> dict[tuple[str, ...], float]:
    """Seconds per step of every combination by hand, from a short look."""
    found: dict[tuple[str, ...], float] = {}
    for settings in subject.combinations():
        try:
            version = start(settings)
        except RuntimeError as failed:  # what a user would leave, too
            print(f"  failed: {', '.join(settings)}: {str(failed).strip().splitlines()[-1]}", flush=True)
            continue
        best = min(found.values(), default=math.inf)
        hopeless = version.step > HOPELESS * best
        count = _turns(seconds, version.step)
        found[settings] = version.step if hopeless else min(version.turn(count) for _ in range(3))
        version.end()
        print(f"  {1000 * found[settings]:8.1f} ms  {', '.join(settings) or AS_IT_IS}", flush=True)
    return found


def raced(starts: dict[str, Callable[[], Version]], seconds: float, rounds: int, processes: int) -> Any:
    """Rounds in which every version takes a turn, each begun by another. Each version has several processes, one after
    the other: how much memory glibc gives back in a step, and how many page faults that costs, is chance of a process.
    """
    from penstock.ladder.statistics import Journal

    journal: Journal[str] = Journal()
    names = list(starts)
    for _ in range(processes):
        versions = {name: start() for name, start in starts.items()}
        for number in range(-(-rounds // processes)):
            at = number % len(names)
            order = (*names[at:], *names[:at])
            journal.add({n: versions[n].turn(_turns(seconds, versions[n].step)) for n in order})
        for version in versions.values():
            version.end()
    return journal.joint()


def measured(name: str, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One script: all versions by hand, what tuning chose, and how far apart they are."""
    subject = SUBJECTS[name]
    arguments = tuple(str(folder / "out") if word == "OUT" else word for word in subject.arguments)

    def start(settings: tuple[str, ...], *more: Change) -> Version:
        script = folder / f"{'_'.join(settings).replace(' ', '_') or 'script'}.py"
        script.write_text(subject.text(settings), encoding="utf-8")
        changes = [*(subject.by_hand[each] for each in settings), *more]
        words = [str(script), *arguments, *(word for change in changes for word in change.arguments)]
        environment = {key: value for change in changes for key, value in change.environment.items()}
        return Version(words, environment, folder / "hand.log")

    print(f"{name}: by hand", flush=True)
    looks = looked(start, subject, given.look)
    script = folder / "script.py"
    command = [
        sys.executable, "-m", "penstock", "tune", "--budget", str(given.budget), "--output", str(folder / "tune"),
        str(script), *arguments,
    ]  # fmt: skip
    print(f"{name}: penstock tune --budget {given.budget:g}", flush=True)
    begin = time.perf_counter()
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    tuning = time.perf_counter() - begin
    chosen = json.loads((folder / "tune" / "tune.json").read_text(encoding="utf-8"))
    line = chosen["plan"] if chosen["same"]["rungs"] else ""
    print(f"{name}: it chose {line or 'the script as it is'}; the race", flush=True)
    words = ["run", "--plan", line, str(script), *arguments] if line else [str(script), *arguments]
    starts = {AS_IT_IS: partial(start, ()), TUNED: partial(Version, words, {}, folder / "tuned.log")}
    order = [settings for settings in sorted(looks, key=lambda each: looks[each]) if settings]
    for place, settings in enumerate(order[: given.finalists]):
        starts[" + ".join(settings)] = partial(start, settings)
        if place < 2:
            starts[" + ".join([*settings, "kept memory"])] = partial(start, settings, KEPT_MEMORY)
    joint = raced(starts, given.turn, given.rounds, given.processes)
    hands = [each for each in starts if each not in (AS_IT_IS, TUNED)]
    best = min(hands, key=joint.seconds)
    ratio = joint.ratio(TUNED, best)
    print(
        f"{name}: tune's choice is {ratio.value:.3f} times as fast ({ratio.low:.3f} to {ratio.high:.3f}) as the best "
        f"by hand: {best}",
        flush=True,
    )
    return {
        "script": subject.script,
        "arguments": list(subject.arguments),
        "looks": {" + ".join(each) or AS_IT_IS: seconds for each, seconds in looks.items()},
        "line": line,
        "tuning_seconds": tuning,
        "seconds": {each: joint.seconds(each) for each in starts},
        "over_as_it_is": {each: asdict(joint.ratio(each, AS_IT_IS)) for each in starts if each != AS_IT_IS},
        "best_by_hand": best,
        "tune_over_best_by_hand": asdict(ratio),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scripts", default=",".join(SUBJECTS), help="with commas between them")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds for each penstock tune")
    parser.add_argument("--finalists", type=int, default=3, help="versions by hand in the last race")
    parser.add_argument("--rounds", type=int, default=15, help="of the last race")
    parser.add_argument("--processes", type=int, default=3, help="of each version in the last race")
    parser.add_argument("--turn", type=float, default=0.6, help="seconds of a turn in it, at the least")
    parser.add_argument("--look", type=float, default=0.4, help="seconds of a turn before it")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    from penstock.report.record import environment

    settings = {
        key: getattr(given, key) for key in ("budget", "finalists", "rounds", "processes", "turn", "look")
    }
    record: dict[str, Any] = {"scripts": {}}
    if (
        given.output and given.output.exists()
    ):  # scripts that are measured again take the place of their figures
        record = json.loads(given.output.read_text(encoding="utf-8"))
    for name in given.scripts.split(","):
        with tempfile.TemporaryDirectory(prefix="tune_by_hand_") as folder:
            record["scripts"][name] = {
                "environment": environment(),
                "settings": settings,
                **measured(name, given, Path(folder)),
            }
        if given.output:  # after each, so that a run that is broken off has what is done
            given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]), int(sys.argv[3]), sys.argv[5:])
    else:
        main()
