"""`torchrun -m penstock train`: torch's own launcher starts ranks that train as one process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.jobs import texts_in
from helpers.runs import losses_of
from helpers.toy import desk
from penstock.cli import main

SMALL = ["--model.width", "32", "--model.depth", "2", "--model.heads", "2", "--model.mlp_width", "64"]
# Every sample has as many words to tell, so that the mean over ranks is that of one process.
JOB = ["gpt-tiny", "--model.sequence", "24", "--data", "text:words"]


def _words(folder: Path, machine: str, plan: str) -> list[str]:
    settings = ["--plan", plan, "--recipe.steps", "4", "--recipe.warmup_steps", "1", "--recipe.lr", "1e-3"]
    settings += ["--device", "cpu", "--log_every", "1"]
    return ["train", *JOB, *SMALL, *settings, "--machine", machine, "--output", str(folder)]


@pytest.mark.slow
def test_torchrun_starts_ranks_that_train_as_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(texts_in(tmp_path))
    machine = desk(tmp_path)
    several, single = tmp_path / "several", tmp_path / "single"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
        "penstock",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, *_words(several, machine, "micro_batch=8 dp=2 sharding=fsdp")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert main(_words(single, machine, "micro_batch=8 accumulate=2")) == 0
    ours, theirs = losses_of(several), losses_of(single)
    assert len(ours) == 4
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert (several / "export").exists()
