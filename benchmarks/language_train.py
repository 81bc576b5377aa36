"""Training steps of language models: Penstock's Plans beside transformers' Trainer and hand-written loops.

    python benchmarks/language_train.py --model gpt2 --tokens 512 --output benchmarks/results/language_train_cpu.json
    python benchmarks/language_train.py --device cuda --model llama3-1b --tokens 16384 --sequence 4096 --output FILE

Each call measures one cell: a model and a batch of so many tokens. All contestants train one architecture from one draw
of weights on one batch of full sequences, with the dropout of transformers' configuration: the next token of a decoder,
15 % masked words of an encoder, translation with smoothed labels of an encoder–decoder.

First come heats, in which each contestant is alone in memory. The fastest of each kind then live side by side, and take
steps in rounds A B C, B C A, …, so that drift of the machine cancels. Ratios are medians of the ratios within a round.
Heats and rounds are stored as they come: the same call again goes on where it was interrupted.

The plain loop is transformers' model in fp32 with AdamW, as torch has them by default; the fair one has torch's fast
products of fp32 matrices besides. The loops by hand are what a careful user would try: fused AdamW, autocast and half
precision where the machine multiplies it faster, torch.compile, and of an encoder logits of the masked words alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

WARM_UP = 3
LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01
SMOOTHING = 0.1
MASKED = 0.15
SEQUENCE = {512: 128, 4096: 512}
"""Tokens of a sample for so many of a batch, where nobody says."""
FINALISTS = {"plain": 1, "fair": 1, "trainer": 1, "hand": 2, "penstock": 2}
"""How many of each kind take part in the rounds."""


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


@dataclass
class Contestant:
    """A way to train, and its measurements. `make` builds it; what it returns takes so many steps and says the seconds
    of one."""

    name: str
    kind: str
    """`plain`, `fair`, `trainer`, `hand` or `penstock`."""
    make: Callable[[], Callable[[int], float]]
    heat: dict[str, Any] = field(default_factory=dict)
    rounds: list[float] = field(default_factory=list)


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
    first = [base, replace(base, loss="chunked"), replace(base, compile="whole")]
    if half:
        base = replace(base, attention="auto")
        auto = [replace(base, precision=level) for level in ("O1", "O2", "O3")]  # type: ignore[arg-type]
        first += [
            *auto,
            *(replace(plan, loss="chunked") for plan in auto),
            *(replace(plan, compile="whole") for plan in auto),
        ]
    return first


def contestants(
    config: ModelConfig, batch: Batch, device: torch.device, machine: Machine, plans: list[Plan]
) -> list[Contestant]:
    """All that enter the heats."""
    fast = "high" if device.type == "cuda" else "medium"
    half = halves(machine)
    found: list[Contestant] = []

    def hand(name: str, kind: str = "hand", **options: Any) -> None:
        found.append(Contestant(name, kind, partial(by_hand, config, batch, device, **options)))

    hand("plain fp32", "plain")
    hand(f"plain fp32, matmul {fast}", "fair", matmul=fast)
    for bf16 in (False, True) if "bf16" in half else (False,):
        make = partial(by_trainer, config, batch, device, bf16=bf16)
        found.append(Contestant(f"Trainer {'bf16' if bf16 else 'fp32'}", "trainer", make))
    types: list[tuple[str, dict[str, Any]]] = [("fp32", {})]
    for name, dtype in half.items():
        types += [(f"autocast {name}", {"autocast": dtype}), (f"pure {name}", {"whole": dtype})]
    for name, options in types:
        for compiled in (False, True):
            for masked_only in (False, True) if isinstance(config, EncoderConfig) else (False,):
                words = ", compiled" * compiled + ", masked words only" * masked_only
                hand(
                    f"hand {name}{words}",
                    matmul=fast,
                    fused=True,
                    compiled=compiled,
                    masked_only=masked_only,
                    **options,
                )
    for plan in plans:
        plan = replace(plan, micro_batch=len(batch.tokens))
        name = f"penstock {replace(plan, micro_batch=Plan().micro_batch).line()}"
        found.append(Contestant(name, "penstock", partial(by_plan, config, batch, device, plan)))
    return found


# -- measuring


def forget() -> None:
    """Let go of contestants and of their compiled code."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def heats(entries: list[Contestant], device: torch.device, store: Callable[[], None]) -> None:
    """Each contestant alone: seconds of a step, of its first one besides, and what failed."""
    for entry in entries:
        if entry.heat:
            continue
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            run = entry.make()
            first = run(1)
            run(WARM_UP - 1)
            entry.heat = {"seconds": min(run(1) for _ in range(3)), "first_seconds": first}
            del run
        except (RuntimeError, ValueError) as error:
            entry.heat = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        if device.type == "cuda":
            entry.heat["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        forget()
        print(f"  heat: {entry.name}: {entry.heat}", flush=True)
        store()


def finalists(entries: list[Contestant]) -> list[Contestant]:
    """The fastest of each kind, in the order in which they entered."""
    ranked = sorted((e for e in entries if "seconds" in e.heat), key=lambda e: e.heat["seconds"])
    chosen = {
        id(entry)
        for kind, count in FINALISTS.items()
        for entry in [e for e in ranked if e.kind == kind][:count]
    }
    return [entry for entry in entries if id(entry) in chosen]


def race(entries: list[Contestant], rounds: int, steps: int, store: Callable[[], None]) -> None:
    """Rounds in which all take part, until each has so many."""
    done = min(len(entry.rounds) for entry in entries)
    for entry in entries:
        del entry.rounds[done:]  # of a round that was interrupted
    if done >= rounds:
        return
    runs = []
    for entry in entries:
        run = entry.make()
        run(WARM_UP)
        runs.append((entry, run))
    for turn in range(done, rounds):
        shift = turn % len(runs)
        for entry, run in runs[shift:] + runs[:shift]:
            run(1)  # the one before has left its own state in the caches and the allocator
            entry.rounds.append(run(steps))
        store()
        print(f"  round {turn + 1} of {rounds}", flush=True)


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
    raced = [entry for entry in entries if entry.rounds]
    best = {
        kind: min(
            (e for e in raced if e.kind == kind), key=lambda e: statistics.median(e.rounds), default=None
        )
        for kind in FINALISTS
    }
    ours = best["penstock"]
    if ours is None:
        return {}
    found: dict[str, Any] = {"penstock": ours.name}
    for kind, other in best.items():
        if other is not None and other is not ours:
            ratios = [theirs / mine for theirs, mine in zip(other.rounds, ours.rounds)]
            found[f"over_{kind}"] = {
                "name": other.name, "median": statistics.median(ratios), "min": min(ratios), "max": max(ratios),
            }  # fmt: skip
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
    parser.add_argument("--no-compile", action="store_true", help="leave compiled contestants out")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="steps timed in a round")
    parser.add_argument("--output", type=Path, help="other cells in it stay")
    options = parser.parse_args()

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
    if options.no_compile:
        entries = [entry for entry in entries if "compile" not in entry.name]
    stored = json.loads(options.output.read_text()) if options.output and options.output.exists() else {}
    cells = stored.get("cells", {})
    key = f"{options.model}, {samples} x {sequence} tokens, {device.type}"
    kept = {one["name"]: one for one in cells.get(key, {}).get("contestants", [])}
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
    heats(entries, device, store)
    race(finalists(entries), options.rounds, options.steps, store)
    store()
    for entry in sorted((e for e in entries if e.rounds), key=lambda e: statistics.median(e.rounds)):
        print(f"{entry.name:<80}{1e3 * statistics.median(entry.rounds):9.1f} ms")
    print(json.dumps(cells[key]["verdict"], indent=1))


if __name__ == "__main__":
    main()
