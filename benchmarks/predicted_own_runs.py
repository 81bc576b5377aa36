"""Predictions of Penstock's own training steps on this machine, beside measurements.

    OMP_NUM_THREADS=1 python benchmarks/predicted_own_runs.py --output benchmarks/results/predicted_own_runs_cpu.json

Each case of each round is a process of its own, like a real run, or one process for each of the Plan's replicas. It
probes the machine, takes steps and probes again. On a CPU, whose speed other guests of a host change by a third within
a minute, a fixed product is timed around each probe and between steps: predictions are scaled by how much slower it was
among the steps than around the probe. Errors are medians over the rounds; what they were without this scaling is kept
beside them. On one CPU thread, time is processor time, which other processes do not lengthen; elsewhere, and where
processes wait for each other, it is wall-clock time. Memory is the peak of all tensors within a step of one process, as
the ladder counts them, without the batch. A GPU has larger cases, which share this process.

Whether forecasts of Plans with each fused operator are within 10 % (in median over the rounds, each of them) is what
this answers in eight minutes, also by its exit status; `--only fuse=auto` takes those of larger batches:

    OMP_NUM_THREADS=1 python benchmarks/predicted_own_runs.py --only fuse= --skip fuse=auto --rounds 1 --within 0.1
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from penstock.build import Built, build
from penstock.config.machine import Machine
from penstock.config.model import PRESETS, ModelConfig, Seq2SeqConfig, ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.config.tasks import require_vision
from penstock.containers import tensors as tensors_in
from penstock.cpu import this_cpu
from penstock.ladder.trace import trace
from penstock.models.fuse import fuse, unfuse
from penstock.planner.prediction import Prediction, predict, predict_workload
from penstock.probe import probe, resolve_device
from penstock.report.record import environment
from penstock.step.memory import step_with_memory

FUSED = "optimizer=fused attention=native fuse=auto host_memory=keep"
"""What is fused on a CPU, for Plans in bf16."""
CASES = (
    ("vit-digits", "micro_batch=64"),
    ("vit-digits", "micro_batch=8 optimizer=fused"),
    ("vit-ti16", "micro_batch=1 optimizer=fused"),
    ("vit-ti16", "micro_batch=4 optimizer=fused host_memory=keep"),
    ("vit-s16", "micro_batch=1 optimizer=fused"),
    ("vit-s16", "micro_batch=2 attention=plain optimizer=fused"),
    ("vit-b16", "micro_batch=1 optimizer=fused"),
    ("vit-b16", "micro_batch=2 optimizer=fused host_memory=keep"),
    ("vit-l16", "micro_batch=1 optimizer=fused host_memory=keep"),
    ("vit-h14", "micro_batch=1 optimizer=fused host_memory=keep"),
    ("vit-s16", "micro_batch=2 optimizer=fused matmul=medium host_memory=keep"),
    ("vit-s16", "micro_batch=2 optimizer=fused precision=O1 host_memory=keep"),
    ("vit-s16", "micro_batch=2 optimizer=fused precision=O2 attention=plain host_memory=keep"),
    ("vit-ti16", "micro_batch=4 optimizer=fused precision=O3 attention=plain host_memory=keep"),
    ("gpt-tiny", "micro_batch=8 optimizer=fused host_memory=keep"),
    ("gpt2 of 128 tokens", "micro_batch=4 optimizer=fused host_memory=keep"),
    ("gpt2 of 128 tokens", "micro_batch=4 optimizer=fused host_memory=keep loss=chunked"),
    ("qwen2-0.5b of 128 tokens", "micro_batch=1 optimizer=fused host_memory=keep"),
    ("bert-tiny", "micro_batch=8 optimizer=fused host_memory=keep"),
    ("bert-base of 128 tokens", "micro_batch=4 optimizer=fused host_memory=keep"),
    ("modernbert-base of 256 tokens", "micro_batch=2 optimizer=fused host_memory=keep"),
    ("t5-small of 128 tokens", "micro_batch=4 optimizer=fused host_memory=keep"),
    ("marian-base of 128 tokens", "micro_batch=4 optimizer=fused host_memory=keep"),
    ("marian-base of 128 tokens", "micro_batch=4 optimizer=fused host_memory=keep attention=plain"),
    ("gpt2, 4 blocks", "micro_batch=2 optimizer=fused"),
    ("gpt2, 4 blocks", "micro_batch=8 optimizer=fused host_memory=keep"),
    ("gpt2, 12 blocks", "micro_batch=1 optimizer=fused host_memory=keep"),
    ("bert, 4 blocks", "micro_batch=4 optimizer=fused host_memory=keep"),
    ("bert, 12 blocks", "micro_batch=1 optimizer=fused host_memory=keep"),
    ("t5, 2 x 3 blocks", "micro_batch=4 optimizer=fused host_memory=keep"),
    ("t5, 2 x 6 blocks", "micro_batch=2 optimizer=fused host_memory=keep"),
    ("vit-s16", "micro_batch=2 optimizer=fused host_memory=keep dp=2"),
    ("vit-s16", "micro_batch=2 optimizer=fused host_memory=keep dp=2 sharding=fsdp"),
    ("gpt2, 4 blocks", "micro_batch=4 optimizer=fused host_memory=keep dp=2"),
    ("bert, 4 blocks", "micro_batch=4 optimizer=fused host_memory=keep dp=2"),
    ("vit-ti16", f"micro_batch=4 precision=O2 {FUSED}"),
    ("vit-s16", f"micro_batch=4 precision=O1 {FUSED}"),
    ("llama-tiny", f"micro_batch=8 precision=O1 {FUSED}"),
    ("gpt2 of 128 tokens", f"micro_batch=4 precision=O1 {FUSED}"),
    ("bert-base of 128 tokens", f"micro_batch=4 precision=O1 {FUSED}"),
    ("bert-base of 128 tokens", "micro_batch=4 optimizer=fused fuse=auto host_memory=keep"),
    ("marian-base of 128 tokens", f"micro_batch=4 precision=O1 {FUSED}"),
    *(
        (model, f"micro_batch=2 {line}")
        for model in ("vit-s16", "bert-base of 64 tokens", "gpt2 of 64 tokens", "marian-base of 64 tokens")
        for line in (
            "optimizer=fused fuse=bias_activation host_memory=keep",
            f"precision=O1 {FUSED.replace('auto', 'residual_norm')}",
        )
    ),
    ("bert, 4 blocks", "micro_batch=4 optimizer=fused fuse=residual_norm,bias_activation host_memory=keep"),
    ("gpt2, 4 blocks", "micro_batch=4 optimizer=fused fuse=bias_activation host_memory=keep"),
)
GPU_CASES = (
    ("vit-s16", "micro_batch=128 optimizer=fused matmul=high"),
    ("vit-b16", "micro_batch=128 optimizer=fused precision=O1"),
    ("vit-b16", "micro_batch=128 optimizer=fused precision=O1 compile=whole"),
    ("vit-l16", "micro_batch=64 optimizer=fused precision=O3 compile=blocks"),
    ("vit-h14", "micro_batch=64 optimizer=fused precision=O2 recompute=full"),
    ("gpt2 of 1024 tokens", "micro_batch=16 optimizer=fused precision=O1 attention=flash loss=chunked"),
    ("gpt2 of 1024 tokens", "micro_batch=16 optimizer=fused precision=O1 attention=flash compile=blocks"),
    ("bert-base of 512 tokens", "micro_batch=32 optimizer=fused precision=O1"),
    ("t5-small of 512 tokens", "micro_batch=32 optimizer=fused precision=O1"),
    (
        "qwen2-0.5b of 2048 tokens",
        "micro_batch=8 optimizer=fused precision=O1 attention=flash recompute=operators",
    ),
    (
        "llama3-1b of 4096 tokens",
        "micro_batch=2 optimizer=fused precision=O2 attention=flash compile=blocks loss=chunked",
    ),
    ("bert, 12 blocks", "micro_batch=32 optimizer=fused precision=O1"),
)
"""What is measured on a GPU, where the cases above would wait for launches alone."""
LARGE = ("vit-l16", "vit-h14")
"""Cases measured only in the first rounds, because a step takes seconds."""
LARGE_ROUNDS = 2
SIZES = {
    # width, blocks, heads, words
    "gpt2, 4 blocks": (256, 4, 4, 4096),
    "gpt2, 12 blocks": (768, 12, 12, 50257),
    "bert, 4 blocks": (256, 4, 4, 4096),
    "bert, 12 blocks": (768, 12, 12, 30522),
    "t5, 2 x 3 blocks": (256, 3, 4, 4096),
    "t5, 2 x 6 blocks": (512, 6, 8, 32128),
}
TOKENS = 256
WARM_UP = 3
"""Warm-up steps at the least."""
MOST_WARM_UP = 12
SETTLED = 256
"""New pages of a step below which the heap has settled. A heap that keeps its memory still grows for about five steps,
and each page that it touches first takes 10 µs here."""
STEPS_SECONDS = 1.0
"""Steps between two yardsticks take at least this many seconds."""
YARDSTICK_PRODUCTS = 64
PIECES = 3
"""How many times steps are measured, with a yardstick before, between and after."""


def cases_on(kind: str) -> list[Case]:
    """What is measured on a kind of device."""
    return [Case(model, Plan.parse(line)) for model, line in (GPU_CASES if kind == "cuda" else CASES)]


@dataclass
class Case:
    """One model under one Plan."""

    model: str
    plan: Plan


def foreign(name: str, device: torch.device) -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor]]:
    """A model of transformers, as a user would give it to `penstock ladder`, and its loss."""
    import transformers as t

    torch.manual_seed(0)
    width, depth, heads, words = SIZES[name]
    model: nn.Module
    if name.startswith("gpt2"):
        model = t.GPT2LMHeadModel(t.GPT2Config(
            n_embd=width, n_layer=depth, n_head=heads, n_positions=TOKENS, vocab_size=words, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
        ))  # fmt: skip
    elif name.startswith("bert"):
        model = t.BertForMaskedLM(t.BertConfig(
            hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads, intermediate_size=4 * width,
            vocab_size=words, max_position_embeddings=TOKENS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ))  # fmt: skip
    else:
        model = t.T5ForConditionalGeneration(t.T5Config(
            d_model=width, d_kv=width // heads, d_ff=4 * width, num_layers=depth, num_heads=heads, vocab_size=words,
            dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
        ))  # fmt: skip

    def loss(model: nn.Module, batch: Any) -> Tensor:
        tokens, targets = batch
        inputs = {"decoder_input_ids": targets} if name.startswith("t5") else {}
        logits = model(tokens, **inputs).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return model.to(device), loss


def text(
    case: Case, config: ModelConfig, words: str, device: torch.device
) -> tuple[Built, Any, Callable[[Machine], Prediction]]:
    """As `prepared`, of a text model of ours on samples of so many tokens, such as `128 tokens`."""
    assert not isinstance(config, ViTConfig)
    if words:
        tokens = int(words.split()[0])
        config = replace(config, sequence=tokens, max_positions=config.max_positions or config.sequence)
        if isinstance(config, Seq2SeqConfig):
            config = replace(config, decoder_sequence=tokens)
    batch = case.plan.micro_batch

    def drawn(length: int) -> Tensor:
        return torch.randint(0, config.vocabulary, (batch, length), device=device)

    inputs = [drawn(config.sequence)]
    if isinstance(config, Seq2SeqConfig):
        inputs.append(drawn(config.decoder_sequence))
    targets = drawn(inputs[-1].shape[1])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        *given, targets = batch
        return model(*given, targets=targets) / targets.numel()  # type: ignore[no-any-return]

    built = build(config, case.plan, device=device, recipe=Recipe(), loss=loss)
    return built, (*inputs, targets), lambda machine: predict(config, machine, case.plan)


def prepared(case: Case, device: torch.device) -> tuple[Built, Any, Callable[[Machine], Prediction]]:
    """The built model, a batch, and what predicts its step on a Machine."""
    plan, batch = case.plan, case.plan.micro_batch
    recipe = Recipe()
    preset, _, words = case.model.partition(" of ")
    if preset in PRESETS and not isinstance(PRESETS[preset], ViTConfig):
        return text(case, PRESETS[preset], words, device)
    if case.model in PRESETS:
        config = require_vision(PRESETS[case.model])
        built = build(config, plan, device=device, recipe=recipe)
        images = torch.randn(batch, config.channels, config.image_size, config.image_size, device=device)
        targets = torch.randint(0, config.classes, (batch,), device=device)
        return built, (images, targets), lambda machine: predict(config, machine, plan)
    module, loss = foreign(case.model, device)
    tokens = torch.randint(0, SIZES[case.model][-1], (batch, TOKENS), device=device)
    fuse(module, plan.fuse)
    work = trace(module, (tokens, tokens), loss, batch)
    unfuse(module)  # `build` does it again
    built = build(module, plan, device=device, recipe=recipe, loss=loss)
    return built, (tokens, tokens), lambda machine: predict_workload(work, machine, plan)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock_of(device: torch.device) -> Callable[[], float]:
    """Processor time where this process computes alone on one thread."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1 and not distributed.is_initialized()
    return time.process_time if alone else time.perf_counter


class Yardstick:
    """A fixed product whose time says how fast the machine is at a moment."""

    def __init__(self, device: torch.device, products: int = YARDSTICK_PRODUCTS) -> None:
        self.clock, self.products = clock_of(device), products
        self.left, self.right = torch.ones(512, 768, device=device), torch.ones(768, 3072, device=device)
        self.fixed = device.type != "cpu"
        """A GPU of its own keeps its clock, which the probe reads."""

    def seconds(self) -> float:
        """Seconds of one product, the mean of about two seconds unless fewer products were asked for: a neighbour's
        load comes and goes within one."""
        if self.fixed:
            return 1.0
        if distributed.is_initialized():
            distributed.barrier()
        self.left @ self.right
        start = self.clock()
        for _ in range(self.products):
            self.left @ self.right
        return (self.clock() - start) / self.products


def warm_up(built: Built, batches: list[Any], device: torch.device) -> None:
    """Take steps until one touches no new pages on any rank; of plans that give memory back each step, the least."""
    for turn in range(1, MOST_WARM_UP + 1):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        built.step(batches)
        wait(device)
        new = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        if distributed.is_initialized():
            distributed.all_reduce(new, distributed.ReduceOp.MAX)
        if turn >= WARM_UP and (built.plan.host_memory != "keep" or int(new) < SETTLED):
            return


def step_seconds(
    built: Built, batches: list[Any], device: torch.device, yardstick: Yardstick
) -> tuple[float, float]:
    """Seconds of one step, after some to warm up, and those of the yardstick at that time."""
    clock = clock_of(device)
    warm_up(built, batches, device)
    # Processes that wait for each other must agree on the number of steps.
    steps = torch.zeros((), dtype=torch.int64)
    start = clock()
    built.step(batches)
    wait(device)
    steps += max(1, round(STEPS_SECONDS / (clock() - start)))
    if distributed.is_initialized():
        distributed.broadcast(steps, 0)
    took, speeds = [], [yardstick.seconds()]
    for _ in range(PIECES):
        start = clock()
        for _ in range(int(steps)):
            built.step(batches)
            wait(device)
        took.append((clock() - start) / int(steps))
        speeds.append(yardstick.seconds())
    return statistics.mean(took), statistics.mean(speeds)


def probed(device: torch.device, yardstick: Yardstick, *, precise: bool) -> tuple[Machine, float]:
    """What this machine can do, and the seconds of the yardstick before and after it was measured."""
    before = yardstick.seconds()
    machine = probe(device, quick=not precise)
    return machine, (before + yardstick.seconds()) / 2


def measure(case: Case, device: torch.device, *, precise: bool) -> dict[str, Any]:
    """One round of one case."""
    yardstick = Yardstick(device)
    machines = [probed(device, yardstick, precise=precise)]
    built, batch, prediction = prepared(case, device)
    batches = [batch] * case.plan.accumulate
    took, speed = step_seconds(built, batches, device, yardstick)
    held = step_with_memory(built.step, batches)[1] - sum(one.nbytes for one in tensors_in(batch))
    del built, batch, batches
    gc.collect()
    machines.append(probed(device, yardstick, precise=precise))
    said = [prediction(machine) for machine, _ in machines]
    slower = [speed / then for _, then in machines]
    return {
        "measured": took,
        "predicted": sum(one.iteration_seconds * by for one, by in zip(said, slower)) / 2,
        "as_probed": sum(one.iteration_seconds for one in said) / 2,
        "slower_than_probed": sum(slower) / 2,
        "measured_bytes": held,
        "predicted_bytes": said[0].memory_bytes,
        "parts": said[-1].seconds,
        "threads": torch.get_num_threads(),
        "device": device.type,
    }


def measured_apart(index: int, options: argparse.Namespace) -> dict[str, Any]:
    """`measure` in a process of its own, whose allocator and caches no other case has touched."""
    device = resolve_device(options.device)
    case = cases_on(device.type)[index]
    if device.type == "cuda":  # a process would take longer to start than to measure
        found = measure(case, device, precise=options.precise)
        torch.compiler.reset()
        return found
    processes = case.plan.dp
    together = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(together if processes > 1 else ()), __file__]
    command += ["--device", options.device, "--case", str(index)]
    command += ["--precise"] if options.precise else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))  # type: ignore[no-any-return]


def summary(case: Case, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON of one case."""
    errors = [one["predicted"] / one["measured"] - 1 for one in rounds]
    held, thought = rounds[0]["measured_bytes"], rounds[0]["predicted_bytes"]
    return {
        "model": case.model,
        "plan": case.plan.line(),
        "step_seconds": {
            "measured": statistics.median(one["measured"] for one in rounds),
            "predicted": statistics.median(one["predicted"] for one in rounds),
        },
        "step_error": {"median": statistics.median(errors), "min": min(errors), "max": max(errors)},
        "every_step_error": errors,
        "error_as_probed": [one["as_probed"] / one["measured"] - 1 for one in rounds],
        "slower_than_probed": [one["slower_than_probed"] for one in rounds],
        "memory_bytes": {"measured": held, "predicted": thought},
        "memory_error": thought / held - 1,
        "rounds": len(errors),
        "predicted_parts_last_round": rounds[-1]["parts"],
    }


def with_earlier(done: list[dict[str, Any]], output: Path) -> list[dict[str, Any]]:
    """All cases in their order: those measured now, and of the others what the file holds."""
    stored = json.loads(output.read_text(encoding="utf-8"))["cases"] if output.exists() else []
    found = {(one["model"], one["plan"]): one for one in [*stored, *done]}
    order = [(case.model, case.plan.line()) for kind in ("cpu", "cuda") for case in cases_on(kind)]
    return [found[key] for key in order if key in found]


def store(options: argparse.Namespace, cases: list[Case], rounds: dict[int, list[dict[str, Any]]]) -> None:
    """Write the rounds so far."""
    first = next(iter(rounds.values()))[0]
    alone = first["device"] == "cpu" and first["threads"] == 1
    done = [summary(cases[index], seen) for index, seen in rounds.items() if seen]
    record = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/predicted_own_runs.py" if alone else "see the script",
        "clock": "processor time of one thread" if alone else "wall clock",
        "probe": "precise" if options.precise else "quick",
        "threads": first["threads"],
        "cases": with_earlier(done, options.output),
        "environment": environment(),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="cases whose model and Plan contain this, such as dp=2")
    parser.add_argument("--skip", help="cases whose model or Plan contains this are left out")
    parser.add_argument(
        "--precise", action="store_true", help="probe for a minute in place of seconds, each time"
    )
    parser.add_argument(
        "--within", type=float, help="exit with 1 if a median error of time is larger, such as 0.1"
    )
    parser.add_argument("--case", type=int, help="measure this one once, and print what was found as JSON")
    parser.add_argument("--output", type=Path, help="cases in it that are not measured now stay")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    device = resolve_device(options.device)
    cases = cases_on(device.type)
    if options.case is not None:
        case = cases[options.case]
        if case.plan.dp > 1:
            distributed.init_process_group("gloo")
        found = measure(case, device, precise=options.precise)
        if case.plan.dp == 1 or distributed.get_rank() == 0:
            print(json.dumps(found))
        if case.plan.dp > 1:
            distributed.destroy_process_group()
        return
    rounds: dict[int, list[dict[str, Any]]] = {
        index: []
        for index, line in enumerate(f"{case.model} {case.plan.line()}" for case in cases)
        if (options.only or "") in line and not (options.skip and options.skip in line)
    }
    if device.type == "cpu" and not this_cpu().bf16_pairs:
        lacking = [index for index in rounds if cases[index].plan.attention == "native"]
        rounds = {index: seen for index, seen in rounds.items() if index not in lacking}
        print(f"{len(lacking)} cases need AVX512-BF16 and are left out")
    for turn in range(options.rounds):
        for index, seen in rounds.items():
            if turn >= LARGE_ROUNDS and cases[index].model in LARGE:
                continue
            seen.append(measured_apart(index, options))
            one = seen[-1]
            print(
                f"round {turn + 1} of {options.rounds}: {cases[index].model}, {cases[index].plan.line()}: "
                f"{one['predicted'] / one['measured'] - 1:+.1%} "
                f"(without yardstick {one['as_probed'] / one['measured'] - 1:+.1%})",
                flush=True,
            )
            if options.output:
                store(options, cases, rounds)
    for one in (summary(cases[index], seen) for index, seen in rounds.items()):
        took, said = one["step_seconds"]["measured"], one["step_seconds"]["predicted"]
        print(
            f"{one['model']:<16}{one['plan']:<52}{1e3 * took:9.1f} ms, predicted {1e3 * said:9.1f} "
            f"({one['step_error']['median']:+.1%}); memory {one['memory_bytes']['measured'] / 2**20:8.1f} MiB "
            f"({one['memory_error']:+.1%})"
        )
    errors = [abs(summary(cases[index], seen)["step_error"]["median"]) for index, seen in rounds.items()]
    if options.within is not None and max(errors, default=math.inf) > options.within:
        sys.exit(
            f"the largest median error is {max(errors, default=math.inf):.1%}, more than {options.within:.0%}"
        )


if __name__ == "__main__":
    main()
