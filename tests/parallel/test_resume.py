"""A run over ranks goes on bit for bit where it was cut: weights, optimizer, loss scale, chance and all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.spawn import spawn
from helpers.toy import desk
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import Augment, Recipe, RunConfig
from penstock.step import TrainStep
from penstock.train import train
from penstock.train.metrics import read_metrics

MODEL = ViTConfig(
    image_size=8, patch_size=4, channels=1, width=16, depth=2, heads=2, mlp_width=32, classes=10, dropout=0.1
)  # fmt: skip
STEPS, CUT = 8, 5


class Cut(Exception):
    """Ends a run on all ranks without a chance to save."""


def _config(folder: Path, line: str) -> RunConfig:
    return RunConfig(
        model=MODEL,
        recipe=Recipe(
            steps=STEPS, lr=3e-3, warmup_steps=2, augment=Augment(flip=0.0, mixup=0.2), clip_norm=0.5
        ),
        plan=Plan.parse(line),
        machine=desk(folder),
        output=str(folder / "run"),
        device="cpu",
        seed=5,
        checkpoint_every=3,
        log_every=1,
    )


def _run(config: RunConfig, first: int, cut: int | None) -> list[float]:
    """Train from step `first`; returns the loss scale after each step, 1 where there is none. Before step 2 it is set
    far too high, so that steps are skipped and it is on its way down when the checkpoint of step 3 is written."""
    scales: list[float] = []
    step = TrainStep.__call__

    def counted(self: TrainStep, batches: Any) -> Any:
        number = first + len(scales)
        if number == cut:
            raise Cut
        if self.scaler is not None and number == 2:
            self.scaler.scale.fill_(2.0**27)
        result = step(self, batches)
        scales.append(1.0 if self.scaler is None else float(self.scaler.scale))
        return result

    TrainStep.__call__ = counted  # type: ignore[method-assign]
    try:
        train(config)
    except Cut:
        assert cut is not None
    finally:
        TrainStep.__call__ = step  # type: ignore[method-assign]
    return scales


def _both(folder: Path, lines: list[str]) -> list[tuple[list[float], list[float], list[float]]]:
    found = []
    for number, line in enumerate(lines):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        whole = _config(place, line)
        broken = replace(whole, output=f"{whole.output}-broken")
        found.append((_run(whole, 0, None), _run(broken, 0, CUT), _run(broken, 3, None)))
    return found


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted((folder / "checkpoints" / f"step-{STEPS}").rglob("*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def _losses(folder: Path) -> dict[int, float]:
    records = read_metrics(folder / "metrics.jsonl")
    return {r["step"]: r["losses"][0] for r in records if r["event"] == "steps"}


def _check(world: int, folder: Path, lines: list[str]) -> None:
    runs = spawn(_both, world, folder, lines, timeout=200)
    assert all(found == runs[0] for found in runs), "ranks had different loss scales"
    for number, (line, (whole, before, after)) in enumerate(zip(lines, runs[0])):
        assert len(whole) == STEPS
        if "fp16" in line:
            assert whole[1] == 2.0**16
            assert whole[2] < 2.0**27, f"{line}: nothing overflowed"
            assert after[0] != 2.0**16, f"{line}: the loss scale began anew"
        assert whole[:CUT] == before, line
        assert whole[3:] == after, f"{line}: the loss scale went another way"
        ours, theirs = folder / str(number) / "run", folder / str(number) / "run-broken"
        assert _losses(ours) == _losses(theirs), line
        one, other = _tensors(ours), _tensors(theirs)
        assert one.keys() == other.keys()
        assert {name for name in one if not torch.equal(one[name], other[name])} == set(), line
        assert any("exp_avg" in name for name in one)


@pytest.mark.slow
def test_fp16_over_shards_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    _check(
        2,
        tmp_path,
        [
            "dp=2 micro_batch=8 sharding=fsdp precision=O1 dtype=fp16 optimizer=fused",
            "dp=2 micro_batch=8 sharding=hsdp shard=1 precision=O2 dtype=fp16 optimizer=contiguous accumulate=2",
        ],
    )


@pytest.mark.sweep
def test_int8_goes_on_where_it_was_cut_however_ranks_split_the_model(tmp_path: Path) -> None:
    """Also the chance by which each rank rounds its gradients."""
    plans = (
        "tp=2 micro_batch=8", "tp=2 sp=true micro_batch=8", "pp=2 micro_batch=4 accumulate=2",
        "dp=2 micro_batch=8 sharding=fsdp",
    )  # fmt: skip
    _check(2, tmp_path, [f"{line} precision=O1 products=int8_all" for line in plans])


@pytest.mark.sweep
def test_fp16_over_groups_of_shards_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    lines = [
        f"dp=4 micro_batch=8 sharding={sharding} precision={level} dtype=fp16 optimizer={form}"
        for sharding in ("fsdp", "hsdp shard=2")
        for level, form in (("O1", "contiguous"), ("O2", "fused"))
    ]
    _check(4, tmp_path, lines)


def _moved(folder: Path, first: str, lines: list[str]) -> None:
    """A run under `first`, and for each line one that is cut under `first` and goes on under the line."""
    model = replace(MODEL, dropout=0.0, classifier="pooled")
    whole = _config(folder, first)
    # Samples are mixed within a micro-batch, whose size differs.
    recipe = replace(whole.recipe, augment=Augment(flip=0.0, mixup=0.0))
    whole = replace(whole, model=model, recipe=recipe)
    train(whole)
    step = TrainStep.__call__
    for number, line in enumerate(lines):
        broken = replace(whole, output=f"{folder}/{number}")
        calls = iter(range(CUT))

        def cut(self: TrainStep, batches: Any, calls: Any = calls) -> Any:
            if next(calls, None) is None:
                raise Cut
            return step(self, batches)

        TrainStep.__call__ = cut  # type: ignore[method-assign]
        with pytest.raises(Cut):
            train(broken)
        TrainStep.__call__ = step  # type: ignore[method-assign]
        assert train(replace(broken, plan=Plan.parse(line))).resumed_at == 3


def test_a_run_goes_on_with_split_tokens_and_with_its_optimizer_offloaded(tmp_path: Path) -> None:
    lines = ["cp=2 micro_batch=16 recompute=early", "dp=2 micro_batch=8 sharding=fsdp offload=optimizer"]
    spawn(_moved, 2, tmp_path, "dp=2 micro_batch=8", lines, timeout=200)
    expected = _losses(tmp_path / "run")
    for number, line in enumerate(lines):
        assert _losses(tmp_path / str(number)) == pytest.approx(expected, rel=1e-5), line
