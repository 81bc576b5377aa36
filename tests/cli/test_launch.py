"""`penstock launch`: what it is told, what it runs, and the templates that call it."""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.pace import at_reference_pace
from penstock.cli import app, main
from penstock.cli.launch import launch as verb
from penstock.cli.launch import names_no_degree, python_arguments
from penstock.config.plan import Plan
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, ExitCode
from penstock.launch import ELASTIC
from penstock.launch.report import FINAL
from penstock.train.prepare import fit_to_started_ranks

EXAMPLES = Path(__file__).parents[2] / "examples" / "launch"


@pytest.mark.parametrize(
    ("program", "command"),
    [
        (["vit-digits", "--epochs", "3"], ["-m", "penstock", "train", "vit-digits", "--epochs", "3"]),
        (["train", "vit-digits"], ["-m", "penstock", "train", "vit-digits"]),
        (["--config", "run.toml"], ["-m", "penstock", "train", "--config", "run.toml"]),
        (["train.py", "--lr", "3"], ["train.py", "--lr", "3"]),
        (["-m", "my.trainer", "-v"], ["-m", "my.trainer", "-v"]),
    ],
)
def test_what_follows_the_dashes_is_what_python_runs(
    program: list[str], command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)")
    (tmp_path / "run.toml").write_text("seed = 1")
    (tmp_path / "my").mkdir()
    assert python_arguments(program) == command


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (["nowhere.py"], "The script nowhere.py cannot be read: it does not exist. Give its path from "),
        (["broken.py"], "The script broken.py is not valid Python, line 2: invalid syntax: x = = 3"),
        (["null.py"], "The script null.py is not valid Python"),
        (["folder.py"], "The script folder.py cannot be read: "),
        (["-m", "no_such_package.train"], "There is no module 'no_such_package': neither in "),
    ],
)
def test_what_can_never_run_is_not_started(
    program: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("import os\nx = = 3\n")
    (tmp_path / "null.py").write_bytes(b"x = 3\0")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ConfigError) as caught:
        python_arguments(program)
    assert str(caught.value).startswith(said)


def test_a_missing_package_is_told_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import no_such_package\n")
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "launch", "--", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.count("No module named 'no_such_package'") == 1, done.stderr
    assert "restarted" not in done.stderr


@pytest.mark.parametrize(
    ("words", "replicas"),
    [
        (["gpt-tiny"], True),
        (["gpt-tiny", "--plan", "precision=O1 micro_batch=4"], True),
        (["gpt-tiny", "--plan", "dp=1"], False),
        (["gpt-tiny", "--plan.tp", "2"], False),
        (["--config", "none.toml"], True),
        (["--config", "line.toml"], False),
        (["--config", "table.toml"], False),
        (["-m", "http.server"], False),
        (["generate", "nowhere"], False),
        (["embed", "nowhere"], False),
    ],
)
def test_ranks_are_replicas_where_no_plan_says_what_they_share(
    words: list[str], replicas: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, plan in (("none", "seed = 1"), ("line", 'plan = "dp=2"'), ("table", "[plan]\ndp = 2")):
        (tmp_path / f"{name}.toml").write_text(f'model = "gpt-tiny"\n{plan}\n')
    assert names_no_degree(python_arguments(words)) == replicas


def test_replicas_keep_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ELASTIC, "1")
    monkeypatch.setattr("penstock.train.prepare.launched", lambda: 4)
    plan = fit_to_started_ranks(RunConfig(plan=Plan(micro_batch=8, accumulate=3))).plan
    assert (plan.dp, plan.global_batch) == (4, 24)
    monkeypatch.delenv(ELASTIC)
    assert fit_to_started_ranks(RunConfig()).plan.dp == 1


@pytest.mark.parametrize("program", [[], ["-m"], ["--help"], ["generate", "--version"]])
def test_nothing_to_run_is_refused(program: list[str]) -> None:
    with pytest.raises(ConfigError):
        python_arguments(program)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--procs 0", "--procs is '0', but must be at least 1."),
        ("--procs many", "--procs is 'many', but must be a number or auto."),
        ("--nnodes 3:2 --rdzv a:1", "--nnodes is 3:2"),
        ("--nnodes x", "--nnodes is 'x'"),
        ("--nnodes 2", "Several nodes need a rendezvous"),
        ("--nnodes 2 --rdzv host", "--rdzv is 'host', but must be HOST:PORT"),
        ("--nnodes 2 --rdzv host:99999", "--rdzv is 'host:99999'"),
        ("--nnodes 2 --rdzv host:1 --node-rank 2", "--node-rank is 2, but must be from 0 to 1"),
        ("--max-restarts -1", "max_restarts is -1"),
        ("--hang-seconds -1", "hang_seconds is -1"),
    ],
)
def test_what_cannot_be_is_said(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *options.split(), "--", "vit-digits"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("vit-digits --plan.tp 2", "plan.tp=2 cannot split the model's 3 attention heads"),
        ("train vit-digits --recipe.steps 3 --recipe.warmup_steps 20", "recipe.warmup_steps is 20 steps"),
        ("vit-digits --config run.toml", "plan.tp=2 cannot split"),
        ("vit-digits --recipe.lr fast", "recipe.lr"),
    ],
)
def test_a_run_that_its_ranks_would_refuse_starts_none(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text("[plan]\ntp = 2\n")
    monkeypatch.chdir(tmp_path)
    shown = []
    # As each rank says it, and with its code.
    assert main(["train", *words.removeprefix("train ").split()]) == 2
    shown.append(capsys.readouterr().err)

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("penstock.launch.agent.Life", started)
    assert main(["launch", "--procs", "2", "--", *words.split()]) == 2
    shown.append(capsys.readouterr().err)
    assert said in " ".join(shown[0].split())
    assert shown[1] == shown[0]


def test_options_that_train_lacks_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--procs", "2", "--", "vit-digits", "--foo", "3"]) == 2
    assert capsys.readouterr().out.count("--foo") + capsys.readouterr().err.count("--foo") <= 1


@pytest.mark.alone
def test_the_agent_of_one_node_needs_no_torch_and_little_time(tmp_path: Path) -> None:
    script = tmp_path / "quick.py"
    script.write_text("")
    program = (
        "import sys\nfrom penstock.cli import main\n"
        f"code = main(['launch', '--procs', '1', '--', {str(script)!r}])\n"
        "assert code == 0 and 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )

    def measured(_: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "COLUMNS": "100"})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert at_reference_pace(measured, 5) < 0.6, "the agent and one empty rank, in processor seconds"


@pytest.mark.sweep
def test_the_ranks_of_a_command_line_train_one_model(tmp_path: Path) -> None:
    from penstock.config.machine import Machine, save_machine

    machine = Machine(
        name="desk", device="cpu", source="measured", peak_flops={"fp32": 1e11}, launch_seconds=1e-6
    )  # fmt: skip
    path = save_machine(machine, tmp_path / "machine.json")
    small = "--model.width 16 --model.depth 1 --model.heads 2 --model.mlp_width 32 --model.patch_size 4"
    rest = (
        f"--recipe.steps 4 --recipe.warmup_steps 1 --machine {path} --output {tmp_path / 'run'} --device cpu"
    )
    command = [
        *(sys.executable, "-m", "penstock", "launch", "--procs", "2", "--", "vit-digits"),
        *("--plan", "micro_batch=16 dp=2", *small.split(), *rest.split()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done: top-1") == 1
    assert "done: top-1" not in done.stderr
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()


# -- templates


def _accepted(words: list[str]) -> tuple[Any, Plan]:
    """What the command line makes of a template's words, and the Plan in them. Anything wrong raises."""
    assert words[:2] == ["penstock", "launch"]
    command, bound, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
    assert command is verb
    program = list(bound.args)
    assert python_arguments(program)[:3] == ["-m", "penstock", "train"]
    return bound, Plan.parse(program[program.index("--plan") + 1])


def _filled(text: str, values: dict[str, str]) -> list[str]:
    """The words of the `penstock launch` command in a shell script, its variables filled in."""
    joined = text.replace("\\\n", " ")
    line = next(one for one in joined.splitlines() if "penstock launch" in one and not one.startswith("#"))
    words = shlex.split(line[line.index("penstock launch") :])
    return [re.sub(r"\$\{?(\w+)\}?", lambda found: values[found[1]], word) for word in words]


def test_the_slurm_template_parses_and_is_accepted() -> None:
    path = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    values = {"SLURM_NNODES": "4", "HEAD": "node-1", "SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "x"}
    bound, plan = _accepted(_filled(text, values))
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert bound.arguments["settings"].nnodes == options["nodes"]
    assert bound.arguments["settings"].procs == options["gpus-per-node"]
    assert plan.gpus == int(options["nodes"]) * int(options["gpus-per-node"])
    assert options["signal"].startswith("USR1@")
    assert re.search(r"^#SBATCH --requeue$", text, re.MULTILINE)
    assert '"$CODE" -eq 75' in text


def test_the_skypilot_template_parses_and_is_accepted() -> None:
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    values = {
        "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "HEAD": "10.0.0.1",
    }  # fmt: skip
    _, plan = _accepted(_filled(task["run"], values))
    kind, each = task["resources"]["accelerators"].split(":")
    assert plan.gpus == task["num_nodes"] * int(each), kind
    assert 75 in task["resources"]["job_recovery"]["recover_on_exit_codes"]
    subprocess.run(["bash", "-n"], input=task["run"].encode(), check=True)


def test_the_kubeflow_template_parses_and_is_accepted() -> None:
    runtime, job = yaml.safe_load_all((EXAMPLES / "trainjob.yaml").read_text())
    assert (runtime["kind"], job["kind"]) == ("ClusterTrainingRuntime", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    node = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    rules = {rule["action"]: rule["onExitCodes"]["values"] for rule in node["podFailurePolicy"]["rules"]}
    assert rules["Ignore"] == [ExitCode.SAVED_REQUEUE]
    assert set(rules["FailJob"]) < FINAL
    bound, plan = _accepted(trainer["command"])
    assert bound.arguments["settings"].nnodes == str(trainer["numNodes"])
    assert plan.gpus == trainer["numNodes"] * trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    name, replica = job["metadata"]["name"], runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["name"]
    assert bound.arguments["settings"].rdzv.startswith(f"{name}-{replica}-0-0.{name}:")
