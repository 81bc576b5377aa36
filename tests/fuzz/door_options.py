"""The command line: every verb with any options, up to the first heavy work. That is left out, and what checks the
settings right before it is run instead.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st

from fuzz.doors import Case, Door
from penstock.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EnvironmentProblem,
    OutOfMemory,
    PenstockError,
)  # fmt: skip

_LINES = {
    "train": "train vit-digits --device cpu --recipe.epochs 2 --plan.micro_batch 16 --plan precision=O1",
    "ladder": "ladder vit-ti16 --device cpu --machine h100 --batch 4 --rungs optimizer-fused --rounds 3",
    "plan": "plan gpt-1.7b --machine a100-80g --explain precision=O2 --global-batch 8 --tokens 1e9 --price 2.5 --json",
    "search": "plan gpt2 --machine h100 --gpus 8 --model.sequence 2048 --base precision=O1 --top 3 --html page.html",
    "laws": "plan --budget-gpu-hours 1000 --served-tokens 1e12",
    "scale": "scale vit-ti16 --device cpu --batches 2 --headroom 3 --lr 1e-4",
    "probe": "probe --device cpu --quick --output machine.toml --json",
    "doctor": "doctor --json",
    "launch": "launch --procs 2 --nnodes 1:2 --rdzv localhost:29400 --hang-seconds 60 -- vit-digits --recipe.epochs 1",
    "run": "run --precision O1 --dtype bf16 --option loss_scale=1024 script.py --epochs 2",
    "pack": "pack images packed --size 64 --format jpeg --quality 90 --threads 1",
    "verify": "checkpoint verify run --step 4",
    "list": "checkpoint list run --json",
    "export": "checkpoint export run out --weights ema --shard-gb 2.5 --names plain",
}
_ERRORS = {
    error.exit_code: error
    for error in (ConfigError, EnvironmentProblem, DataError, CheckpointError, OutOfMemory)
}
_ODD = (
    "", " ", "0", "-1", "1", "nan", "inf", "-inf", "1e400", "1e308", "5e-324", "1e30", "9" * 30, "9" * 5000,
    "2147483648", "9223372036854775808", "18446744073709551616", "0x10", "1_0", "1e5", "0.1", "true", "none", "auto",
    "cuda:99999999999", "cpu", ":", "a:b", "..a:b", "a:b:c", "a.b", "..", "/", "/dev/null", "x" * 5000, "\x1b[2J",
    "\u202e", "\ud800", "é", "a=b", "precision=O9", "level=1", "dp=1e30", "[1]", "{}", "--", "-", "--help",
    "missing.toml", "imagefolder:", "pack:/",
)  # fmt: skip


def _seeds() -> dict[str, bytes]:
    return {name: line.replace(" ", "\n").encode() for name, line in _LINES.items()}


def _enter(name: str, data: bytes) -> None:
    from penstock.cli import main

    # A command line has no NUL, and bytes that are no UTF-8 come as halves of characters.
    words = data.decode("utf-8", "surrogateescape").replace("\0", "").replace("\t", " ").split("\n")
    told = io.StringIO()
    code = 0
    with (
        _without_heavy_work(),
        contextlib.redirect_stderr(told),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(_Enough),
    ):
        code = main(words)
    if code:
        message = told.getvalue()
        # Our parser of options draws a box around its words.
        plain = message.translate(dict.fromkeys(map(ord, "╭╮╰╯│─…\n"), " ")).strip()
        raise _ERRORS.get(code, PenstockError)(plain if plain.endswith((".", "!", "?")) else f"{plain}.")


class _Enough(BaseException):
    """The settings have been let in."""


@contextlib.contextmanager
def _without_heavy_work() -> Iterator[None]:
    os.makedirs("run/checkpoints/step-4", exist_ok=True)
    os.makedirs("images/a", exist_ok=True)
    with contextlib.suppress(FileExistsError), open("script.py", "x") as script:
        script.write("import sys\n")
    with contextlib.ExitStack() as stack:
        for place, instead in _INSTEAD.items():
            stack.enter_context(patch(place, instead))
        yield


def _train(config: Any, **_: Any) -> Any:
    from penstock.config.machine import load_machine
    from penstock.config.rules import require
    from penstock.optim.groups import learning_rate
    from penstock.planner.prediction import predict
    from penstock.probe import resolve_device
    from penstock.tasks import task_of
    from penstock.train.prepare import Calendar

    resolve_device(config.device)
    machine = load_machine(config.machine or "h100")
    source = task_of(config.model).open(config.data, config.model, "train")
    require(config.plan, config.model, machine, run=True)
    calendar = Calendar(config, len(source))
    learning_rate(0, config.recipe, calendar.total)
    predict(config.model, machine, config.plan)
    raise _Enough


def _climb(*, config: Any, **_: Any) -> Any:
    from penstock.config.machine import load_machine
    from penstock.data.transform import load_function
    from penstock.ladder.rungs import choose
    from penstock.ladder.settings import command_of
    from penstock.probe import resolve_device

    choose(config.rungs, config.skip)
    command_of(config)
    resolve_device(config.device)
    load_machine(config.machine or "h100")
    if config.factory is not None:
        load_function(config.factory, "factory")
    raise _Enough


def _subject(config: Any, factory: Any, device: Any) -> Any:
    from penstock.data.transform import load_function

    if config.factory is not None:
        load_function(config.factory, "factory")
    raise _Enough


def _probe(device: str, *, quick: bool) -> Any:
    from penstock.config.machine import load_machine
    from penstock.probe import resolve_device

    resolve_device(device)
    return load_machine("h100")


def _enough(*_: Any, **__: Any) -> Any:
    raise _Enough


_INSTEAD: dict[str, Any] = {
    "penstock.train.train": _train,
    "penstock.ladder.climb.ladder": _climb,
    "penstock.ladder.own.subject_of": _subject,
    "penstock.probe.probe": _probe,
    "penstock.probe.keep": lambda machine: None,
    "penstock.doctor.findings": lambda **_: [],
    "penstock.launch.agent.launch": lambda command, settings, tell, replicas: 0,
    "penstock.cli.plan_page.explore": _enough,
    "penstock.cli.run.run_script": _enough,
    "penstock.cli.pack.pack_source": _enough,
    "penstock.checkpoint.reader.open_verified": _enough,
    "penstock.checkpoint.manifest.check_sizes": _enough,
}


def _made() -> st.SearchStrategy[Case]:
    return st.builds(_changed, st.sampled_from(sorted(_LINES)), st.lists(_change, min_size=1, max_size=3))


_values = st.one_of(
    st.sampled_from(_ODD), st.integers().map(str), st.floats().map(repr), st.text(max_size=12)
)
_change = st.tuples(
    st.sampled_from(("value", "value", "value", "add", "drop", "swap")),
    st.integers(0, 40),
    _values,
    st.integers(0, 400),
)


def _changed(name: str, changes: list[tuple[str, int, str, int]]) -> Case:
    words = _LINES[name].split(" ")
    for kind, place, value, option in changes:
        at = 1 + place % max(1, len(words) - 1)
        if kind == "value":
            words[at : at + 1] = [value]
        elif kind == "add":
            keys = _keys(words[0])
            words[at:at] = [keys[option % len(keys)], value]
        elif kind == "drop":
            del words[at : at + 1]
        else:
            words[at : at + 1], words[-1:] = words[-1:], words[at : at + 1]
    return name, "\n".join(words).encode("utf-8", "surrogatepass")


def _keys(verb: str) -> list[str]:
    """Options of a verb, and of others."""
    from penstock.cli.plan_config import PlanConfig
    from penstock.cli.scale import ScaleConfig
    from penstock.config.describe import settings
    from penstock.config.run import RunConfig
    from penstock.ladder.settings import LadderConfig

    cls = {"plan": PlanConfig, "ladder": LadderConfig, "scale": ScaleConfig}.get(verb, RunConfig)
    more = ["--config", "--step", "--json", "--rdzv", "--nope"]
    return [f"--{setting.key}" for setting in settings(cls)] + more


DOORS = {
    "options": Door(
        seeds=_seeds, enter=_enter, made=_made,
        tokens=(b"\n--plan\n", b"\n--model.width\n", b"\n--seed\n", b"\n--config\n", b"=", b"\n\n", b"nan", b"1e400",
                b"\n--\n"),
    )
}  # fmt: skip
