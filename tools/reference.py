"""Write docs/reference/settings.md from the configuration dataclasses: `make reference`.

A test runs `page()` and compares, so the page cannot fall behind.
"""

from __future__ import annotations

from pathlib import Path

from penstock.config.convert import dataclasses_of
from penstock.config.describe import Field, default_word, settings, type_word
from penstock.config.machine import known_machines, load_machine
from penstock.config.model import PRESETS, ViTConfig, sequences, stacks
from penstock.config.rules import RULES
from penstock.config.run import RunConfig

PATH = Path(__file__).parent.parent / "docs" / "reference" / "settings.md"

INTRODUCTION = """\
# Every setting of a run

Written by `make reference` from the dataclasses in `penstock.config`; do not edit.

The same names serve in a file (`--config run.toml`; TOML, YAML or JSON), on the command line (`--recipe.lr 1e-4`) and
in Python (`Recipe(lr=1e-4)`). Defaults come first, then the preset's own recipe, the file, and the command line. A part
given whole (`--model vit-s16`, `--plan "precision=O1"`) replaces what earlier layers said of it; single fields then
change it. In a file, `preset = "vit-s16"` in the `[model]` table does the same. Write `none` where a setting may be
empty. What each field of the Plan means is told in [plan.md](plan.md).
"""


def page() -> str:
    """The whole page."""
    parts: dict[str, list[Field]] = {}
    for setting in settings(RunConfig):
        head = setting.key.rpartition(".")[0]
        parts.setdefault(head, []).append(setting)
    lines = [INTRODUCTION]
    for head in sorted(parts, key=lambda head: (head != "", head)):
        lines += [
            f"## {head or 'The run'}",
            "",
            "| setting | values | default | meaning |",
            "|---|---|---|---|",
        ]
        lines += [_row(setting) for setting in parts[head]]
        lines.append("")
    lines += ["## Model presets", "", _presets(), "", "## Machines", "", _machines(), ""]
    lines += [
        "## Rules", "", "What `Plan.validate(model, machine)` asks, all at once; the planner asks all but those marked "
        "`to run`.", "", _rules(), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _row(setting: Field) -> str:
    values = "text" if dataclasses_of(setting.kind) else type_word(setting.kind)
    return (
        f"| `{setting.key}` | {_cell(values)} | `{default_word(setting.default)}` | {_cell(setting.help)} |"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _presets() -> str:
    rows = [
        "| preset | family | width | depth | heads | MLP | of a sample |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, model in PRESETS.items():
        first, *more = stacks(model)
        depth = " + ".join(str(stack.depth) for stack in (first, *more))
        if isinstance(model, ViTConfig):
            sample = f"{model.image_size} px in patches of {model.patch_size}, {model.classes} classes"
        else:
            sample = (
                " + ".join(str(tokens) for tokens in sequences(model)) + f" tokens, {model.vocabulary} words"
            )
        rows.append(
            f"| `{name}` | {model.family} | {first.width} | {depth} | {first.heads} | {first.mlp_width} | {sample} |"
        )
    return "\n".join(rows)


def _rules() -> str:
    rows = ["| rule | asked of | what it asks for |", "|---|---|---|"]
    rows += [
        f"| `{rule.name}` | {', '.join(rule.takes)}{'; to run' * (rule.kind == 'run')} | {_cell(rule.text)} |"
        for rule in RULES
    ]
    return "\n".join(rows)


def _machines() -> str:
    rows = [
        "| machine | bf16 peak | best bf16 seen | memory | bandwidth | note |",
        "|---|---|---|---|---|---|",
    ]
    for name in known_machines():
        machine = load_machine(name)
        peak, best = (rates.get("bf16") for rates in (machine.peak_flops, machine.achievable_flops))
        rows.append(
            f"| `{name}` | {_tera(peak)} | {_tera(best)} | {machine.memory_bytes / 1e9:.0f} GB "
            f"| {machine.memory_bytes_per_second / 1e12:.2f} TB/s | {' '.join(machine.notes)} |"
        )
    return "\n".join(rows)


def _tera(rate: float | None) -> str:
    return "–" if rate is None else f"{rate / 1e12:.0f} TFLOP/s"


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
