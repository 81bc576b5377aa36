"""Write docs/reference/settings.md from the configuration dataclasses: `make reference`.

A test runs `page()` and compares, so the page cannot fall behind.
"""

from __future__ import annotations

from pathlib import Path

from penstock.config.convert import dataclass_of
from penstock.config.describe import Setting, default_word, settings, type_word
from penstock.config.machine import known_machines, load_machine
from penstock.config.model import PRESETS
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
    parts: dict[str, list[Setting]] = {}
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
    return "\n".join(lines)


def _row(setting: Setting) -> str:
    values = "text" if dataclass_of(setting.kind) else type_word(setting.kind)
    return (
        f"| `{setting.key}` | {_cell(values)} | `{default_word(setting.default)}` | {_cell(setting.help)} |"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _presets() -> str:
    rows = [
        "| preset | image | patch | width | depth | heads | MLP | classes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, model in PRESETS.items():
        numbers = (
            model.image_size,
            model.patch_size,
            model.width,
            model.depth,
            model.heads,
            model.mlp_width,
            model.classes,
        )
        rows.append(f"| `{name}` | {' | '.join(str(number) for number in numbers)} |")
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
