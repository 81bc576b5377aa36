"""Training steps of language models: Penstock's Plans beside transformers' Trainer and hand-written loops.

    python benchmarks/language_train.py --model gpt2 --tokens 512 --output benchmarks/results/language_train_cpu.json
    python benchmarks/language_train.py --device cuda --model llama3-1b --tokens 16384 --sequence 4096 --output FILE

Each call measures one cell: a model and a batch of so many tokens. All contestants train one architecture from one draw
of weights on one batch of full sequences, with the dropout of transformers' configuration: the next token of a decoder,
15 % masked words of an encoder, translation with smoothed labels of an encoder–decoder.

First come heats, in which each contestant is alone in memory. The fastest of each kind then live side by side, and take
steps in rounds (`heats.py` has the rules of both). Ratios are medians of the ratios within a round. Heats and rounds
are stored as they come: the same call again goes on where it was interrupted, or where --seconds ended it. What was
measured on another machine or with other versions is measured anew.

The plain loop is transformers' model in fp32 with AdamW, as torch has them by default; the fair one has torch's fast
products of fp32 matrices besides. The loops by hand are what a careful user would try: fused AdamW, autocast and half
precision where the machine multiplies it faster, torch.compile, and of an encoder logits of the masked words alone. Of
an encoder only the latter are compiled or in fp32, for they do less; where half precision is faster, fp32 with the loss
in chunks is left out. Of each kind half precision comes first and compiled forms last, so that what loses is dropped
early.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heats import Contestant, Deadline, bests, finalists, heats, race, ratios
from penstock.build import build
from penstock.config.machine import Machine, match_datasheet
from penstock.config.model import PRESETS, DecoderConfig, EncoderConfig, ModelConfig, Seq2SeqConfig
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.models import create
from penstock.models.convert import text_to_hf, write_text_config
from penstock.planner.describe import totals
from penstock.precision import matmul_precision
from penstock.probe import machine_for, machine_name, resolve_device
from penstock.report.record import environment
from vit_train import halves, wait

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01
SMOOTHING = 0.1
MASKED = 0.15
SEQUENCE = {512: 128, 4096: 512}
"""Tokens of a sample for so many of a batch, where nobody says."""


@dataclass(frozen=True)
class Batch:
    """Token numbers of inputs, and of the targets that the loss is taken of: −100 where there is none."""

    tokens: Tensor
    targets: Tensor
    source: Tensor | None = None
    rows: Tensor | None = None
    """Numbers of the masked words among all tokens."""

    @property
    def picked(self) -> Tensor:
        """Targets of `rows`."""
        assert self.rows is not None
        return self.targets.flatten()[self.rows]


def batch_of(config: ModelConfig, samples: int, device: torch.device) -> Batch:
    """Random tokens of full length."""
    assert isinstance(config, DecoderConfig | EncoderConfig | Seq2SeqConfig)
    drawn = partial(torch.randint, 5, config.vocabulary - 1, generator=torch.Generator().manual_seed(0))
    words = drawn((samples, config.sequence + 1)).to(device)
    if isinstance(config, DecoderConfig):
        return Batch(words[:, :-1].contiguous(), words[:, 1:].contiguous())
    if isinstance(config, Seq2SeqConfig):
        source = drawn((samples, config.sequence)).to(device)
        return Batch(words[:, :-1].contiguous(), words[:, 1:].contiguous(), source)
    tokens = words[:, :-1].contiguous()
    rows = torch.randperm(tokens.numel())[: round(MASKED * tokens.numel())].sort().values.to(device)
    targets = torch.full_like(tokens, -100).flatten()
    targets[rows] = tokens.flatten()[rows]
    tokens.view(-1)[rows] = 4
    return Batch(tokens, targets.view_as(tokens), rows=rows)


def stepped(step: Callable[[], Any], device: torch.device) -> Callable[[int], float]:
    """A clock around a step."""

    def run(steps: int) -> float:
        wait(device)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait(device)
        return (time.perf_counter() - start) / steps

    return run


# -- transformers


def their_model(config: ModelConfig, device: torch.device) -> nn.Module:
    """transformers' model of this shape, with the weights that Penstock draws."""
    import transformers

    assert isinstance(config, DecoderConfig | EncoderConfig | Seq2SeqConfig)
    torch.manual_seed(0)
    values = write_text_config(config)
    cls = getattr(transformers, values["architectures"][0])
    model: nn.Module = cls(cls.config_class(**values, use_cache=False))
    if device.type == "cpu":  # both draw the same otherwise, and it takes minutes for a billion
        model.load_state_dict(text_to_hf(create(config).state_dict(), config), strict=False)
    return model.to(device).train()


def their_loss(model: nn.Module, batch: Batch, *, masked_only: bool) -> Tensor:
    if batch.source is not None:
        logits = model(input_ids=batch.source, decoder_input_ids=batch.tokens).logits
        return F.cross_entropy(
            logits.float().flatten(0, 1), batch.targets.flatten(), label_smoothing=SMOOTHING
        )
    if masked_only:
        features = model.bert(input_ids=batch.tokens).last_hidden_state.flatten(0, 1)[batch.rows]  # type: ignore[union-attr, operator]
        return F.cross_entropy(model.cls(features).float(), batch.picked)  # type: ignore[operator]
    logits = model(input_ids=batch.tokens).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())


def by_hand(
    config: ModelConfig,
    batch: Batch,
    device: torch.device,
    *,
    matmul: str = "highest",
    fused: bool = False,
    autocast: torch.dtype | None = None,
    whole: torch.dtype | None = None,
    compiled: bool = False,
    masked_only: bool = False,
) -> Callable[[int], float]:
    """A training step as one writes it without a library."""
    model = their_model(config, device)
    if whole is not None:
        model = model.to(whole)
    loss_of: Callable[..., Tensor] = partial(their_loss, masked_only=masked_only)
    if compiled:
        loss_of = torch.compile(loss_of, dynamic=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=fused or None
    )

    def step() -> None:
        with matmul_precision(matmul):
            with torch.autocast(device.type, dtype=autocast) if autocast else nullcontext():
                loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return stepped(step, device)


def by_trainer(
    config: ModelConfig, batch: Batch, device: torch.device, *, bf16: bool, compiled: bool = False
) -> Callable[[int], float]:
    """transformers' own loop. Each call trains anew with the same model, and its first step is not counted."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ends(TrainerCallback):  # type: ignore[misc]
        times: list[float]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait(device)
            self.times.append(time.perf_counter())

    class Smoothed(Trainer):  # type: ignore[misc]
        """The loss of the loops by hand, for a Trainer's own takes labels one token later."""

        def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], **_: Any) -> Tensor:
            return their_loss(model, replace(batch, **inputs), masked_only=False)

    model = their_model(config, device)
    given = {"tokens": batch.tokens, "targets": batch.targets, "source": batch.source}
    rows = [
        {name: value[i].cpu() for name, value in given.items() if value is not None}
        for i in range(len(batch.tokens))
    ]
    ends = Ends()

    def run(steps: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            options = TrainingArguments(
                output_dir=folder, max_steps=steps + 1, per_device_train_batch_size=len(rows), bf16=bf16,
                learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY, max_grad_norm=0.0, report_to=[],
                save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
                lr_scheduler_type="constant", use_cpu=device.type == "cpu", torch_compile=compiled,
                label_names=["targets"], dataloader_pin_memory=device.type == "cuda",
            )  # fmt: skip
            ends.times = []
            Smoothed(model=model, args=options, train_dataset=rows, callbacks=[ends]).train()
        return (ends.times[-1] - ends.times[0]) / steps

    return run


# -- Penstock


def our_loss(model: nn.Module, batch: Batch) -> Tensor:
    if batch.source is not None:
        total = model(batch.source, batch.tokens, targets=batch.targets, smoothing=SMOOTHING)
        return total / batch.targets.numel()  # type: ignore[no-any-return]
    if batch.rows is not None:
        return model(batch.tokens, targets=batch.picked, rows=batch.rows) / len(batch.rows)  # type: ignore[no-any-return]
    return model(batch.tokens, targets=batch.targets) / batch.targets.numel()  # type: ignore[no-any-return]


def by_plan(config: ModelConfig, batch: Batch, device: torch.device, plan: Plan) -> Callable[[int], float]:
    """The same step as in `penstock train`, but without clipping, because the others do not clip."""
    recipe = Recipe(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, clip_norm=None)
    built = build(config, plan, device=device, recipe=recipe, loss=our_loss, seed=0)
    return stepped(lambda: built.step([batch]), device)


def default_plans(device: torch.device, half: bool) -> list[Plan]:
    """What the ladder finds on machines of this kind, and its neighbours."""
    if device.type == "cuda":
        base = Plan(precision="O1", matmul="high", optimizer="fused", loss="chunked", compile="blocks")
        others = [replace(base, compile="whole"), replace(base, loss="whole", compile="whole")]
        return [base, *others, replace(base, precision="O2"), replace(base, precision="O2", compile="whole")]
    base = Plan(matmul="medium", optimizer="fused", host_memory="keep")
    levels: list[Plan] = []
    if half:
        auto = replace(base, attention="auto")
        levels = [replace(auto, precision=level) for level in ("O1", "O2", "O3")]  # type: ignore[arg-type]
    eager = [*levels, *(replace(plan, loss="chunked") for plan in levels or [base]), base]
    in_fp32 = [replace(base, matmul="highest"), replace(base, matmul="probed")]
    return eager + in_fp32 + [replace(plan, compile="whole") for plan in (*levels, base)]


def _named(plan: Plan) -> str:
    return f"penstock {replace(plan, micro_batch=Plan().micro_batch).line()}"


def contestants(
    config: ModelConfig, batch: Batch, device: torch.device, machine: Machine, plans: list[Plan]
) -> list[Contestant]:
    """All that enter the heats."""
    fast = "high" if device.type == "cuda" else "medium"
    half = halves(machine)
    found: list[Contestant] = []

    def hand(name: str, kind: str = "hand", eager: str | None = None, **options: Any) -> None:
        in_half = "autocast" in options or "whole" in options
        make = partial(by_hand, config, batch, device, compiled=eager is not None, **options)
        found.append(Contestant(name, kind, make, eager, in_half))

    hand("plain fp32", "plain")
    hand(f"plain fp32, matmul {fast}", "fair", matmul=fast)
    for bf16 in (True, False) if "bf16" in half else (False,):
        make = partial(by_trainer, config, batch, device, bf16=bf16)
        name = f"Trainer {'bf16' if bf16 else 'fp32'}"
        found.append(Contestant(name, "trainer", make, half=bf16, warms_itself=True))
    types: list[tuple[str, dict[str, Any]]] = []
    for name, dtype in half.items():
        types += [(f"autocast {name}", {"autocast": dtype}), (f"pure {name}", {"whole": dtype})]
    types.append(("fp32", {}))
    encoder = isinstance(config, EncoderConfig)
    for compiled in (False, True):
        for name, options in types:
            for masked_only in (True, False) if encoder and not compiled and options else (encoder,):
                words = f"hand {name}{', masked words only' * masked_only}"
                given = {"matmul": fast, "fused": True, "masked_only": masked_only, **options}
                if compiled:
                    hand(f"{words}, compiled", eager=words, **given)
                else:
                    hand(words, **given)
    for plan in plans:
        make = partial(by_plan, config, batch, device, replace(plan, micro_batch=len(batch.tokens)))
        eager = None if plan.compile == "none" else _named(replace(plan, compile="none"))
        found.append(Contestant(_named(plan), "penstock", make, eager, plan.precision != "O0"))
    return found


# -- measuring


def causal_half_flops(config: ModelConfig) -> float:
    """Model FLOPs of one sample, in which causal attention counts for the half that it computes."""
    found = 0.0
    for part in totals(config).parts:
        ops = (*part.forward, *part.backward)
        masked = sum(op.flops for op in ops if op.kind == "attention" and op.causal)
        found += part.count * (part.model_flops - masked / 2)
    return found


def verdict(
    entries: list[Contestant], config: ModelConfig, samples: int, device: torch.device
) -> dict[str, Any]:
    """Ratios between the fastest of each kind, and MFU."""
    best = bests(entries)
    ours = best.pop("penstock", None)
    if ours is None:
        return {}
    found: dict[str, Any] = {"penstock": ours.name}
    intervals = ratios(entries)
    for kind, other in best.items():
        each = [theirs / mine for theirs, mine in zip(other.rounds, ours.rounds)]
        found[f"over_{kind}"] = {
            "name": other.name, "median": statistics.median(each), "min": min(each), "max": max(each),
        }  # fmt: skip
        if kind in intervals:
            found[f"over_{kind}"]["interval"] = [intervals[kind].low, intervals[kind].high]
    rate = causal_half_flops(config) * samples / statistics.median(ours.rounds)
    found["model_tflops_causal_half"] = rate / 1e12
    sheet = None
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        sheet = match_datasheet(machine_name(device), memory)
    if sheet is not None:
        found["mfu_of_datasheet_bf16"] = rate / sheet.peak_flops["bf16"]
    return found


def sized(config: ModelConfig, sequence: int) -> ModelConfig:
    """The model on samples of so many tokens."""
    assert isinstance(config, DecoderConfig | EncoderConfig | Seq2SeqConfig)
    positions = config.max_positions or config.sequence
    config = replace(config, sequence=sequence, max_positions=max(positions, sequence))
    return replace(config, decoder_sequence=sequence) if isinstance(config, Seq2SeqConfig) else config


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2")
    parser.add_argument(
        "--tokens", type=int, default=512, help="of a batch; of an encoder–decoder, on each side"
    )
    parser.add_argument("--sequence", type=int, help="tokens of a sample")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--plan", action="append", help="a Plan to enter; may be given again")
    parser.add_argument(
        "--only", action="append", help="contestants whose name contains this; may be given again"
    )
    parser.add_argument(
        "--skip", action="append", default=[], help="leaves out whose name contains this; may be given again"
    )
    parser.add_argument("--rounds", type=int, default=7, help="at most")
    parser.add_argument("--seconds", type=float, help="after these nothing new begins")
    parser.add_argument("--steps", type=int, default=1, help="steps timed in a round")
    parser.add_argument("--output", type=Path, help="other cells in it stay")
    options = parser.parse_args()
    deadline = Deadline(options.seconds)

    device = resolve_device(options.device)
    machine = machine_for(device)
    sequence = options.sequence or SEQUENCE.get(options.tokens, 512)
    config = sized(PRESETS[options.model], sequence)
    samples = max(1, options.tokens // sequence)
    batch = batch_of(config, samples, device)
    plans = [Plan.parse(line) for line in options.plan or []] or default_plans(
        device, "bf16" in halves(machine)
    )
    entries = contestants(config, batch, device, machine, plans)
    if options.only:
        entries = [entry for entry in entries if any(word in entry.name for word in options.only)]
    entries = [entry for entry in entries if not any(word in entry.name for word in options.skip)]
    stored = json.loads(options.output.read_text()) if options.output and options.output.exists() else {}
    cells = stored.get("cells", {})
    key = f"{options.model}, {samples} x {sequence} tokens, {device.type}"
    here, there = environment(), cells.get(key, {}).get("environment", {})
    alike = all(there.get(part) == here[part] for part in ("machine", "versions"))
    kept = {one["name"]: one for one in cells[key]["contestants"]} if alike else {}
    for entry in entries:
        one = kept.pop(entry.name, {})
        entry.heat, entry.rounds = one.get("heat", {}), one.get("rounds", [])

    def store() -> None:
        cells[key] = {
            "contestants": [
                {"name": e.name, "kind": e.kind, "heat": e.heat, "rounds": e.rounds} for e in entries
            ] + list(kept.values()),
            "steps_a_round": options.steps,
            "verdict": verdict(entries, config, samples, device),
            "gemm_flops_per_second": machine.achievable_flops,
            "environment": environment(),
        }  # fmt: skip
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps({"cells": cells}, indent=1) + "\n")

    print(key, flush=True)
    if heats(entries, device, store, deadline):
        race(finalists(entries), options.rounds, options.steps, store, deadline)
    store()
    for entry in sorted((e for e in entries if e.rounds), key=lambda e: statistics.median(e.rounds)):
        print(f"{entry.name:<80}{1e3 * statistics.median(entry.rounds):9.1f} ms")
    print(json.dumps(cells[key]["verdict"], indent=1))


if __name__ == "__main__":
    main()
