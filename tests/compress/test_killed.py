"""A compression that is killed before each change of its folder, one after the other, ends as one that was not."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.forked import run_python
from helpers.trained_tokenizers import LINES, trained_tokenizer
from penstock.compress.run import PAGE, RECORD
from penstock.config.machine import Machine, save_machine
from penstock.config.model import PRESETS
from penstock.data.text.tokenizers import LibraryTokenizer
from penstock.models import create
from penstock.models.convert import save_pretrained

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from penstock.compress import measure, run
from penstock.config.compress import load_compression

settings, last = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
root, changes = os.path.abspath(settings["output"]), open("changes", "w")
PLACE = {"os.rename": 1, "shutil.rmtree": 0}

def look(event, given):
    if event not in PLACE or not (path := os.path.abspath(given[PLACE[event]])).startswith(root + os.sep):
        return
    change = f"{event} {os.path.relpath(path, root)}"
    if change == last:
        os.kill(os.getpid(), signal.SIGKILL)
    print(change, file=changes, flush=True)

def by_size(bench, models):
    return [[float(sum(weight.numel() for weight in model.parameters()))] * 3 for model in models]

measure.Workbench.latencies = by_size
config = load_compression(overrides=settings)
sys.addaudithook(look)
run.compress(config)
"""
"""Compresses, with latencies that are no chance, and is killed before something in the output folder gets its name or
is removed."""


def _settings(folder: Path) -> Path:
    """The settings of a compression of every step, of a small model with random weights."""
    whole = LibraryTokenizer(trained_tokenizer("BPE"), "whole")
    whole.save(folder / "tokenizer", whole.size)
    (folder / "tokenizer" / "config.json").write_text(json.dumps({"pad_token_id": whole.pad}))
    sizes: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 32, "sequence": 32}
    torch.manual_seed(0)
    model = create(replace(PRESETS["gpt-tiny"], vocabulary=whole.size, **sizes))
    save_pretrained(model, folder / "model", beside=folder / "tokenizer")
    (folder / "lines.txt").write_text("\n".join(LINES))
    peaks = dict.fromkeys(("fp32", "bf16", "fp16", "int8"), 1e11)
    machine = Machine(name="desk", device="cpu", source="measured", peak_flops=peaks, launch_seconds=1e-6)
    settings = {
        "model": str(folder / "model"), "data": f"text:{folder / 'lines.txt'}", "plan": "micro_batch=8",
        "device": "cpu", "machine": str(save_machine(machine, folder / "machine.json")), "output": "out",
        "target": "1.03x", "prune.hidden": "0.5", "prune.samples": "8", "distil.steps": "3",
        "quantise": "int8", "quantise.inputs": "static", "quantise.samples": "16", "quantise.learn": "2",
    }  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "program.py").write_text(PROGRAM)
    return folder / "settings.json"


def _rows(folder: Path) -> list[dict[str, Any]]:
    """The recorded figures, but for how long a step took."""
    rows: list[dict[str, Any]] = json.loads((folder / RECORD).read_text())["rows"]
    return [{name: value for name, value in row.items() if name != "step_seconds"} for row in rows]


@pytest.mark.sweep
def test_a_compression_killed_before_every_change_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    words = [str(tmp_path / "program.py"), str(_settings(tmp_path))]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    code, _, error = run_python([*words, ""], tmp_path, cwd=whole)
    assert code == 0, error
    changes = (whole / "changes").read_text().splitlines()
    steps = ("1-prune", "2-distil", "3-quantise-start", "3-quantise", "export.tmp")
    assert all(any(f" {step}/" in change for change in changes) for step in steps)
    assert changes.count(f"os.rename {RECORD}") == 6
    for change in changes:
        code, _, error = run_python([*words, change], tmp_path, cwd=killed)
        assert code == -signal.SIGKILL, (change, code, error)
    code, _, error = run_python([*words, ""], tmp_path, cwd=killed)
    assert code == 0, error
    assert _rows(killed / "out") == _rows(whole / "out")
    assert (killed / "out" / PAGE).is_file()
    files = [
        {path.name: path.read_bytes() for path in (folder / "out" / "export").iterdir()}
        for folder in (whole, killed)
    ]
    assert files[0] == files[1]
