"""What recomputation costs: layers of the 22B model's size, one device of eight that split them, in milliseconds; and a
whole decoder under budgets.

    python benchmarks/recompute_layers.py --device cuda --output benchmarks/results/recompute_layers_h100.json
    python benchmarks/recompute_layers.py --device cpu --shape small --skip decoder

Korthikanti et al. ("Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, Table 4) measured one
layer of hidden size 6144, 64 heads, 2048 tokens and micro-batch 4 on one of 8 A100s: selective recomputation takes 7 %
more time and full recomputation 39 %. Here the device's slice of such layers runs without the others, so no collective
is in the times; nor is an optimizer. All forms run in one process in rounds whose order is reversed each time;
overheads are medians of the ratios within a round. Predictions are those of a quick probe of the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.build import build
from penstock.config.model import DecoderConfig, preset
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.planner.prediction import predict
from penstock.probe import probe, resolve_device
from penstock.report.record import environment

SHAPES = {
    # Width, features of a head, heads and hidden features of one device of eight, tokens, micro-batch.
    "22b": (6144, 96, 8, 3072, 2048, 4),
    "small": (256, 32, 4, 512, 128, 2),
}
LAYERS = 4
PAPER = {"selective": 0.07, "full": 0.39}
FORMS = {
    "unfused attention": ("attention=plain", ("none", "selective", "full")),
    "fused attention": ("attention=auto", ("none", "early", "full")),
}
"""Settings, and the recomputations that say something beside them: a fused kernel keeps no scores to compute again."""
BUDGETS = (0.0, 0.25, 0.5, 0.75)
"""Of the decoder: shares of what blocks keep beyond full recomputation."""


def layers(shape: str) -> DecoderConfig:
    """Some layers with hardly any output, so that they are all that takes time."""
    width, features, heads, hidden, tokens, _ = SHAPES[shape]
    config = preset("gpt2")
    assert isinstance(config, DecoderConfig)
    return replace(
        config, width=width, depth=LAYERS, heads=heads, head_features=features, mlp_width=hidden, vocabulary=256,
        sequence=tokens, max_positions=tokens, dropout=0.1,
    )  # fmt: skip


class Case:
    """One form: a built model, and its times."""

    def __init__(self, config: DecoderConfig, line: str, device: torch.device) -> None:
        self.config, self.plan, self.device = config, Plan.parse(line), device
        self.seconds: list[float] = []
        self.peak = 0

    def _passes(self, model: Any, tokens: torch.Tensor) -> None:
        """Forward and backward."""
        model.zero_grad(set_to_none=True)
        (model(tokens, targets=tokens) / tokens.numel()).backward()

    def measure(self, seconds: float) -> None:
        """One round. The model is built anew, so that forms never lie in memory together."""
        model = build(self.config, self.plan, device=self.device, recipe=Recipe()).model
        shape = self.plan.micro_batch, self.config.sequence
        tokens = torch.randint(0, self.config.vocabulary, shape, device=self.device)
        for _ in range(2):
            self._passes(model, tokens)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        taken, start = 0, self._now()
        while not taken or self._now() - start < seconds:
            self._passes(model, tokens)
            taken += 1
        self.seconds.append((self._now() - start) / taken)
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device)
        del model

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def race(cases: dict[str, Case], rounds: int, seconds: float, machine: Any) -> dict[str, Any]:
    """Measure the cases in turn, and compare each with the first."""
    for turn in range(rounds):
        for case in list(cases.values())[:: -1 if turn % 2 else 1]:
            case.measure(seconds)
    first = next(iter(cases.values()))
    said = {name: predict(case.config, machine, case.plan) for name, case in cases.items()}
    passes = {name: one.iteration_seconds - one.seconds["optimizer"] for name, one in said.items()}
    base = next(iter(passes.values()))
    found = {}
    for name, case in cases.items():
        ratios = [a / b - 1 for a, b in zip(case.seconds, first.seconds, strict=True)]
        found[name] = {
            "plan": case.plan.line(),
            "milliseconds": 1e3 * statistics.median(case.seconds),
            "overhead": statistics.median(ratios),
            "spread": [min(ratios), max(ratios)],
            "predicted_overhead": passes[name] / base - 1,
            "peak_bytes": case.peak,
            "predicted_bytes": said[name].memory_bytes - said[name].memory["optimizer"],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="22b")
    parser.add_argument("--decoder", default="llama3-1b", help="the whole model that budgets are tried with")
    parser.add_argument("--micro-batch", type=int, default=4, help="of the whole model")
    parser.add_argument("--tokens", type=int, default=2048, help="of a sample of the whole model")
    parser.add_argument("--skip", choices=("layers", "decoder"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a form in a round")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = resolve_device(options.device)
    machine = probe(device, quick=True)
    half = "precision=O1 optimizer=fused" if device.type == "cuda" else "optimizer=fused host_memory=keep"
    found: dict[str, Any] = {}
    if options.skip != "layers":
        config = layers(options.shape)
        for form, (setting, kinds) in FORMS.items():
            line = f"micro_batch={SHAPES[options.shape][-1]} {half} {setting}"
            cases = {kind: Case(config, f"{line} recompute={kind}", device) for kind in kinds}
            found[form] = race(cases, options.rounds, options.seconds, machine)
    if options.skip != "decoder":
        whole = preset(options.decoder)
        assert isinstance(whole, DecoderConfig)
        whole = replace(whole, sequence=options.tokens, max_positions=None)
        line = f"micro_batch={options.micro_batch} {half} attention=auto loss=chunked"
        most = predict(whole, machine, Plan.parse(line)).memory["activations"]
        least = predict(whole, machine, Plan.parse(f"{line} recompute=full")).memory["activations"]
        cases = {"none": Case(whole, line, device)}
        for share in BUDGETS:
            budget = (least + share * (most - least)) / 2**30
            cases[f"budget of {share:.0%}"] = Case(
                whole, f"{line} recompute=budget budget={budget:.3f}", device
            )
        cases["full"] = Case(whole, f"{line} recompute=full", device)
        found[options.decoder] = race(cases, options.rounds, options.seconds, machine)
    for form, cases_found in found.items():
        print(form)
        for name, one in cases_found.items():
            paper = (
                f", the paper's {PAPER[name]:+.0%}" if form == "unfused attention" and name in PAPER else ""
            )
            peak, said = one["peak_bytes"] / 2**30, one["predicted_bytes"] / 2**30
            memory = f"; {peak:.2f} GiB, predicted {said:.2f}" if peak else ""
            print(
                f"  {name:<15}{one['milliseconds']:9.2f} ms  {one['overhead']:+6.1%} "
                f"({one['spread'][0]:+.1%} to {one['spread'][1]:+.1%}), predicted {one['predicted_overhead']:+.1%}"
                f"{paper}{memory}"
            )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        record = {"shape": options.shape, "forms": found, "environment": environment()}
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
