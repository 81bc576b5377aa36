"""The full sweep of what keeps results, measured once, and how close the ladder comes to its best in a few minutes.

    python benchmarks/ladder_sweep.py --model vit-ti16 --image-size 96 --output benchmarks/results/ladder_sweep_cpu.json
    python benchmarks/ladder_sweep.py --model bert --fix optimizer=fused --fix host_memory=keep

Every legal combination of precision, master form, matmul, attention, compile region, optimizer form, token order and
host memory is built and timed in turn with one and the same anchor, a few at a time. All rounds are kept in the JSON,
so that a sweep that was interrupted goes on where it stopped. `--fix` holds a field of the Plan to the values given, so
that a shorter sweep covers what matters. The fastest then race once more, beside the Plan that the ladder finds in
`--ladder` seconds, and the baselines. All figures are of one joint estimate over all rounds.

Models: presets, or `bert` and `gpt2`, small ones of transformers given as a factory. On a machine with matrix units the
aim is 2.2 times the fair baseline (fast fp32 products) for vit-s16.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.machine import Machine
from penstock.config.model import PRESETS, ViTConfig
from penstock.config.plan import Plan
from penstock.ladder import measure
from penstock.ladder.arena import Arena, failure
from penstock.ladder.climb import ladder
from penstock.ladder.measure import Models
from penstock.ladder.own import subject_of
from penstock.ladder.rung import Setting
from penstock.ladder.rungs import all_rungs
from penstock.ladder.settings import LadderConfig
from penstock.ladder.space import Space
from penstock.ladder.subject import Subject
from penstock.probe import machine_for, resolve_device
from penstock.report.record import environment

ANCHOR = "optimizer=fused"
"""The Plan that takes part in every round: eager, in fp32, whatever the machine."""
FACTORIES = ("bert", "gpt2")
SECONDS = 0.5
"""Least time of one turn."""


def bert() -> tuple[nn.Module, Any, Any]:
    """A BERT of 4 layers and 256 features on 8 samples of 128 tokens, a fifth of them padding."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=8192,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    mask = torch.ones(8, 128, dtype=torch.long)
    mask[::2, 77:] = 0
    words = torch.randint(8192, (8, 128))
    batch = {"input_ids": words, "attention_mask": mask, "labels": words}
    return transformers.BertForMaskedLM(config), batch, _own_loss


def gpt2() -> tuple[nn.Module, Any, Any]:
    """A GPT-2 of 4 layers and 256 features on 4 samples of 256 tokens."""
    import transformers

    config = transformers.GPT2Config(
        n_embd=256, n_layer=4, n_head=4, vocab_size=8192, n_positions=256, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    words = torch.randint(8192, (4, 256))
    return transformers.GPT2LMHeadModel(config), {"input_ids": words, "labels": words}, _own_loss


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


class Sweep:
    """The rounds of one model, kept in a file after each group."""

    def __init__(
        self, subject: Subject, config: LadderConfig, machine: Machine, kept: Path, name: str
    ) -> None:
        self.subject, self.kept, self.name = subject, kept, name
        self.file: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
        self.record: dict[str, Any] = self.file.setdefault(
            name, {"rounds": [], "failed": {}, "build_seconds": {}}
        )
        self.record |= {"batch": subject.first.plan.micro_batch, "environment": environment()}
        self.arena = Arena(Models(subject, machine, config), config.rounds, SECONDS, lambda *said: None)
        space = Space(all_rungs(), subject.first, subject.situation(machine))
        every = map(space.at, itertools.product(*space.answers))
        self.settings = {c.setting.plan.line(): c.setting for c in every if c is not None}
        for turn in self.record["rounds"]:
            self.arena.wall.add({self.setting(line): seconds for line, seconds in turn.items()})

    def setting(self, line: str) -> Setting:
        """The setting of a Plan's line."""
        first = self.subject.first
        if line not in self.settings:
            self.settings[line] = replace(
                first, plan=replace(Plan.parse(line), micro_batch=first.plan.micro_batch)
            )
        return self.settings[line]

    def play(self, lines: list[str], rounds: int) -> None:
        """Some rounds of these Plans in turn. One that fails is noted, and the others go on."""
        good = []
        for line in lines:
            try:
                self.arena.build(self.setting(line))
                good.append(line)
            except Exception as error:  # a Plan that cannot run is a result
                self.record["failed"][line] = ": ".join(failure(error))
        self.arena.keep = {self.setting(line) for line in good}
        for _ in range(rounds):
            settings = [self.setting(line) for line in good]
            self.arena.play(settings, 1)
            self.record["rounds"].append({line: self.arena.step_seconds[self.setting(line)] for line in good})
        self.record["build_seconds"] |= {s.plan.line(): t for s, t in self.arena.build_seconds.items()}
        self.save()

    def seconds(self) -> dict[str, float]:
        """Seconds per step of every Plan measured, the fastest first."""
        joint, anchor = self.arena.wall.joint(), self.setting(ANCHOR)
        lines = dict.fromkeys(line for turn in self.record["rounds"] for line in turn)
        found = {line: joint.speed(self.setting(line), anchor) for line in lines}
        base = joint.seconds(anchor)
        return dict(sorted(((line, base / s) for line, s in found.items() if s), key=lambda one: one[1]))

    def save(self) -> None:
        """Write the file."""
        self.record["milliseconds"] = {line: round(1e3 * s, 2) for line, s in self.seconds().items()}
        self.kept.write_text(json.dumps(self.file, indent=1) + "\n")


def wanted(setting: Setting, fixed: dict[str, list[str]]) -> bool:
    """Whether a setting has one of the values that each field is held to."""
    return all(str(getattr(setting.plan, name)) in values for name, values in fixed.items())


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="vit-ti16")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--fix", action="append", default=[], help="field=value,value of the Plan")
    parser.add_argument("--group", type=int, default=6, help="Plans that are built at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--finalists", type=int, default=6)
    parser.add_argument("--final-rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new group begins after so many")
    parser.add_argument(
        "--ladder", type=float, default=0.0, help="seconds of the ladder's own search; 0 is none"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/ladder_sweep_cpu.json"))
    given = parser.parse_args()

    start = time.perf_counter()
    factory = {"bert": bert, "gpt2": gpt2}.get(given.model)
    config = LadderConfig() if factory else LadderConfig(model=PRESETS[given.model], batch=given.batch)
    if given.image_size and isinstance(config.model, ViTConfig):
        config = replace(config, model=replace(config.model, image_size=given.image_size))
    device = resolve_device(config.device)
    machine = machine_for(device)
    name = given.model + (f"-{given.image_size}" if given.image_size else "")
    fixed = {field: values.split(",") for field, _, values in (one.partition("=") for one in given.fix)}

    if given.ladder:
        report = ladder(factory=factory, config=replace(config, budget=given.ladder))
        found = {"plan": report.plan, "speedup": report.speedup, "seconds": report.wall_seconds,
                 "others_busy": report.others_busy, "settings": len(report.tried), "candidates": report.candidates,
                 "control": report.to_dict()["control"], "notes": report.notes}  # fmt: skip
        print(
            f"the ladder: {report.speedup:.2f}x in {report.wall_seconds:.0f} s with {report.plan}", flush=True
        )
        torch.compiler.reset()

    with measure.side_by_side():
        subject = subject_of(config, factory, device)
        sweep = Sweep(subject, config, machine, given.output, name)
        if given.ladder:
            sweep.record["ladder"] = found
        done = {line for turn in sweep.record["rounds"] for line in turn} | sweep.record["failed"].keys()
        left = [line for line, s in sweep.settings.items() if line not in done and wanted(s, fixed)]
        # Of one compiled form after the other, so that its code is there for the next.
        left.sort(key=lambda line: (sweep.settings[line].plan.compile, line))
        for at in range(0, len(left), given.group):
            if time.perf_counter() - start > given.seconds:
                print(f"{len(left) - at} Plans are left for the next run", flush=True)
                break
            sweep.play([ANCHOR, *left[at : at + given.group]], given.rounds)
            sweep.arena.keep = {sweep.setting(ANCHOR)}
            sweep.arena.clear()
            print(f"{time.perf_counter() - start:6.0f} s  {at + given.group} of {len(left)}", flush=True)

        race = list(sweep.seconds())[: given.finalists]
        race += [line for line in (ANCHOR, "baseline", "matmul=medium") if line not in race]
        if "ladder" in sweep.record and sweep.record["ladder"]["plan"] not in race:
            race.append(sweep.record["ladder"]["plan"])
        sweep.play(race, given.final_rounds)
        tell(sweep)


def tell(sweep: Sweep) -> None:
    """Print the ranking, and how far the ladder's Plan is from the best; the latter is kept."""
    ranked = sweep.seconds()
    best = next(iter(ranked))
    first = sweep.setting("baseline")
    for line in list(ranked)[:12]:
        ratio = sweep.arena.ratio(sweep.setting(line), first)
        assert ratio is not None
        print(
            f"{1e3 * ranked[line]:9.1f} ms  {ratio.value:5.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]  {line}"
        )
    sweep.record["best"] = best
    fair = sweep.arena.speed(sweep.setting("matmul=medium"))
    whole = sweep.arena.speed(sweep.setting(best))
    if fair and whole:
        sweep.record["best_over_fair_baseline"] = whole / fair
        print(f"the best is {whole / fair:.2f}x the fair baseline (matmul=medium)")
    if "ladder" in sweep.record:
        behind = sweep.arena.ratio(sweep.setting(sweep.record["ladder"]["plan"]), sweep.setting(best))
        assert behind is not None
        sweep.record["ladder"]["speed_of_best"] = [behind.value, behind.low, behind.high]
        print(f"the ladder's Plan has {100 * behind.value:.1f} % of the best's speed")
    sweep.save()


if __name__ == "__main__":
    main()
