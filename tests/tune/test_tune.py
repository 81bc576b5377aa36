"""Real scripts, tuned in processes of their own: what is learned of them, and what the last line runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from helpers import forked
from helpers.sweeps import sweep
from penstock.cli import main
from penstock.errors import ConfigError
from penstock.ladder.result import LadderReport
from penstock.ladder.settings import TuneConfig
from penstock.tune.process import ScriptCommand, ScriptEnded, ScriptProcess
from penstock.tune.search import tune

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("known_machine")]
SCRIPTS = Path(__file__).parent / "scripts"
ENDLESS = "1000000"


def _tuned(words: str, output: Path, *, procs: int = 1, **options: Any) -> LadderReport:
    name, *arguments = words.split()
    command = ScriptCommand(str(SCRIPTS / name), tuple(arguments), procs=procs)
    config = TuneConfig(output=str(output), budget=900.0, round_seconds=0.02, **options)
    return tune(command, config)


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Races end undecided."""
    for most in ("most_rounds", "control_rounds"):
        monkeypatch.setattr(f"penstock.tune.script.Script.{most}", 3)


@pytest.fixture
def forked_scripts(few_rounds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts run in processes that have torch already."""
    monkeypatch.setattr("penstock.tune.process.subprocess", forked.instead())


@pytest.mark.usefixtures("forked_scripts")
def test_a_plain_loop(tmp_path: Path) -> None:
    report = _tuned(f"plain.py {ENDLESS}", tmp_path, rungs="optimizer")
    assert report.script is not None
    assert [report.script[name] for name in ("model", "optimizer", "device")] == ["Sequential", "Adam", "cpu"]
    assert report.script["parameters"] == 16 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2
    steps = {rung.name: rung for rung in report.rungs}
    fused = steps["optimizer-fused"]
    # How fast it is depends on what else runs here; that it computes the same does not.
    assert fused.status in ("kept", "unproven", "not kept")
    assert fused.forecast is not None
    assert fused.forecast.to_baseline > 1.0
    assert fused.loss_difference == pytest.approx(0.0, abs=1e-4)
    assert steps["optimizer-foreach"].status == "unsupported"
    assert report.noise is not None
    assert len({round(loss, 6) for loss in report.noise.losses}) == 3, (
        "other seeds give other weights and samples"
    )
    # What a script prints goes to a file and not to the terminal; what it would save at its end is left out.
    assert "applied optimizer=fused to Sequential" in "".join(
        log.read_text() for log in tmp_path.glob("*.log")
    )


@pytest.mark.usefixtures("forked_scripts")
@pytest.mark.parametrize("kind", ["automatic", pytest.param("manual", marks=pytest.mark.slow)])
def test_steps_of_a_trainer_are_counted_once_though_it_gives_a_closure(kind: str, tmp_path: Path) -> None:
    """As Lightning's Trainer does; its wrapped optimizer is none of its own."""
    script = Path(__file__).parents[1] / "precision" / "scripts" / "trainer_with_closures.py"
    code, out, error = forked.run_python([str(script), kind, "1", "5"], tmp_path)
    assert code == 0, error
    plain = json.loads(out)["losses"]
    command = ScriptCommand(str(script), (kind, "1", ENDLESS))
    for line, tolerance in (("", 1e-6), ("precision=O1 dtype=bf16 optimizer=fused", 0.02)):
        process = ScriptProcess(command, line, 0, tmp_path / "log", 300.0)
        try:
            process.first_step()
            process.turn(4)
            assert process.steps == 5
            assert process.losses == pytest.approx(plain, rel=tolerance)
            if not line:
                facts, _ = process.facts()
                assert (facts.model, facts.optimizer, facts.mixed) == ("Net", "AdamW", "")
        finally:
            process.close()


@pytest.mark.usefixtures("forked_scripts")
def test_seeds_are_shifted_however_a_script_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")  # as in a shell inside a job, which is none of this script's
    (tmp_path / "seeded.py").write_text(
        "import random\nimport sys\nimport numpy as np\nimport torch\n"
        "seed = int(sys.argv[1])\n"
        "random.seed(a=seed, version=2)\nnp.random.seed(np.int64(seed))\ntorch.manual_seed(seed=seed)\n"
        "drawn = random.random() + np.random.rand() + torch.rand(())\n"
        "model = torch.nn.Linear(1, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.0)\n"
        "while True:\n    (0.0 * model(torch.ones(1)).sum() + drawn).backward()\n    optimizer.step()\n"
    )
    losses = []
    for given, added in ((3, 0), (3, 1), (4, 0)):
        command = ScriptCommand(str(tmp_path / "seeded.py"), (str(given),))
        process = ScriptProcess(command, "", added, tmp_path / "log", 300.0)
        try:
            process.first_step()
            losses += process.losses
        finally:
            process.close()
    assert losses[0] != losses[1] == losses[2]


@pytest.mark.usefixtures("forked_scripts")
@pytest.mark.parametrize(("what", "why"), [("none", "without a step"), ("several", "several optimizers")])
def test_scripts_that_cannot_be_timed_are_refused(what: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        _tuned(f"refused.py {what}", tmp_path)


def test_a_rank_that_never_says_which_it_is_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import socket, sys, time\n"
        "held = socket.create_connection(('127.0.0.1', int(sys.argv[-1].split(':')[0])))\n"
        "time.sleep(60)"
    )
    monkeypatch.setattr(ScriptCommand, "words", lambda self, *options: ["-c", code, *options])
    with pytest.raises(ScriptEnded, match=r"not said which rank it is within 1 s; --timeout") as caught:
        ScriptProcess(ScriptCommand("silent.py"), "", 0, tmp_path / "log", 1.0)
    assert caught.value.status == "late"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Say which script to tune"),
        (("nowhere.py",), "nowhere.py"),
        (("-m", "no_such_module_at_all"), "There is no module"),
        (("--budget", "0", str(SCRIPTS / "plain.py")), "budget is 0.0, but must be above 0"),
        (("--rungs", "nonsense", str(SCRIPTS / "plain.py")), "There is no rung"),
    ],
)
def test_bad_command_lines(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *words]) == 2
    assert message in capsys.readouterr().err


FEW = "timm_train.py", "mnist.py", "seq2seq.py", "amp.py"
"""Scripts that `make test-all` tunes, beside the plain loop of a test of its own; the others take longer."""
KNOWN: dict[str, dict[str, Any]] = {
    f"plain.py {ENDLESS}": {"attention": [], "blocks": 0},
    f"nanogpt.py --max_iters={ENDLESS}": {"blocks": 2},
    f"run_glue.py --max_steps {ENDLESS} --output_dir OUT": {
        "padding": ["remove"],
        "padded": True,
        "form": "fused",
    },
    f"accelerated.py {ENDLESS}": {"optimizer": "AdamW"},
    f"no_trainer.py {ENDLESS}": {"eager": True},
    f"lightning_fit.py {ENDLESS}": {"optimizer": "AdamW", "model": "Classifier"},
    f"lightning_fit.py {ENDLESS} manual": {"optimizer": "AdamW", "model": "Classifier"},
    f"timm_train.py {ENDLESS}": {"blocks": 2},
    f"mnist.py --epochs {ENDLESS}": {"optimizer": "Adadelta"},
    f"seq2seq.py {ENDLESS}": {"optimizer": "Adam"},
    f"amp.py {ENDLESS}": {"mixed": "it scales its loss with a GradScaler of its own"},
}
"""What is found out about each script."""


@pytest.mark.usefixtures("forked_scripts")
@pytest.mark.parametrize("words", sweep(KNOWN, (), slow=[w for w in KNOWN if w.split()[0] in FEW]))
def test_scripts_of_all_kinds(words: str, tmp_path: Path) -> None:
    name = words.split()[0]
    if name == "lightning_fit.py":
        pytest.importorskip("pytorch_lightning")
    words = words.replace("OUT", str(tmp_path / "out"))
    rungs = ["optimizer", "padding", "attention-plain", "matmul"]
    rungs += ["compile-blocks"] * (name == "nanogpt.py")  # which takes long
    report = _tuned(words, tmp_path, rungs=",".join(rungs), rounds=3)
    facts = report.script
    assert facts is not None
    seen = facts | facts["switches"] | {"padded": facts["padding"] > 0}
    known = KNOWN[words.replace(str(tmp_path / "out"), "OUT")]
    assert {key: seen[key] for key in known} == known
    measured = [rung for rung in report.rungs[1:] if rung.measured]
    assert measured, [rung.reason for rung in report.rungs]
    for rung in report.rungs:
        assert rung.status not in ("failed", "out of memory"), rung
        if rung.status == "kept":
            assert rung.to_previous is not None
            assert rung.to_previous.low > 1.0
    line = report.plan if report.same_results.rungs else measured[0].plan
    again = ["-m", "penstock", "run", "--plan", line, *shlex.split(words.replace(ENDLESS, "4"))]
    code, _, error = forked.run_python(again, tmp_path, cwd=SCRIPTS)
    assert code == 0, error
    assert f"applied {line.split()[0].partition('=')[0]}" in error or "accelerated" in error


@pytest.mark.sweep
@pytest.mark.usefixtures("few_rounds")
def test_ranks_under_torchrun(tmp_path: Path) -> None:
    report = _tuned(f"ddp.py {ENDLESS}", tmp_path, procs=2, rungs="optimizer-fused", rounds=3)
    assert next(rung for rung in report.rungs if rung.name == "optimizer-fused").to_previous is not None
    assert re.match(r"torchrun --nproc-per-node 2 ", report.train_command)


@pytest.mark.usefixtures("forked_scripts")
@pytest.mark.slow
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", "--budget", "400", "--rungs", "optimizer-fused", "--output", str(tmp_path), "--all"]
    assert main([*words, str(SCRIPTS / "plain.py"), ENDLESS]) == 0
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "tune.json").read_text())
    assert out.rstrip().endswith(report["train_command"])
    assert "Sequential of 5,378 weights, trained by Adam on cpu" in out
