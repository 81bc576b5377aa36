"""Images and texts in one space: recall, captions and translations of digits in 38 languages, by seed.

    python benchmarks/multimodal_digits.py --runs runs/multimodal --seeds 2 --output multimodal_digits_cpu.json
    python benchmarks/multimodal_digits.py --runs runs/emoji --seeds 1 --output multimodal_emoji_cpu.json --set \
        data.source=captions:emoji model.image_size=32 model.patch_size=8 model.channels=3 \
        model.sequence=64 model.writer_sequence=72

`python examples/emoji_captions.py emoji NAMES FONT…` makes the folder `emoji` (Debian: fonts-noto-color-emoji,
fonts-symbola; npm: @expo-google-fonts/noto-emoji, cldr-annotations-full).

Each seed is one `penstock train multimodal-tiny`. Each is written to --output at once, and a script that was stopped
goes on there when it is started again; a run in --runs that is complete is not made again either.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from penstock.config.recipes import load_run
from penstock.config.run import RunConfig
from penstock.data.captions import open_captions, trained_pairs
from penstock.report.record import environment
from penstock.train import train
from penstock.train.metrics import read_metrics

SCORES = ("image_to_text", "text_to_image", "unseen_words", "captions", "translations", "unseen_pairs")


def evaluated(config: RunConfig) -> dict[str, Any]:
    """The last evaluation of a run, which is made first if it is not there."""
    file = Path(config.output) / "metrics.jsonl"
    records = read_metrics(file) if file.is_file() else []
    done = [r for r in records if r.get("event") == "evaluation" and r["step"] == config.recipe.steps]
    if not done:
        train(config)
        done = [record for record in read_metrics(file) if record.get("event") == "evaluation"]
    return {"seed": config.seed, **done[-1]}


def begun(output: Path, steps: int, settings: dict[str, str]) -> list[dict[str, Any]]:
    """Runs that an earlier call with the same settings has written to a file; none where there is no file."""
    if not output.exists():
        return []
    data: dict[str, Any] = json.loads(output.read_text())
    if (data["steps"], data["settings"]) != (steps, settings):
        raise SystemExit(f"{output} was made with other steps or settings; name another file in --output.")
    return list(data["runs"])


def gathered(runs: list[dict[str, Any]], config: RunConfig, settings: dict[str, str]) -> dict[str, Any]:
    """Scores of all runs, their means and deviations, and what the data holds."""
    model: Any = config.model
    source = open_captions(config.data, "val", channels=model.channels, image_size=model.image_size)
    languages, pictures = source.words.languages, source.pictures
    names = [name for name in SCORES if name != "unseen_words" or source.words.held.any()]
    scores = {name: [run[name] for run in runs] for name in names}
    return {
        "steps": config.recipe.steps,
        "settings": settings,
        "images": len(pictures.images),
        "held_out_images": int(pictures.held.sum()),
        "languages": languages,
        "chance": {name: runs[-1].get(f"{name}_chance") for name in SCORES[:2]},
        "captions_alone": [one for one, pairs in zip(languages, trained_pairs(languages)) if not pairs.any()],
        "mean": {name: statistics.mean(values) for name, values in scores.items()},
        "deviation": {n: statistics.stdev(v) if len(v) > 1 else None for n, v in scores.items()},
        "runs": runs,
        "environment": environment(),
    }


def table(data: dict[str, Any]) -> list[str]:
    """The lines of the page's table: means over seeds, with deviations where there are several."""
    count = len(data["runs"])
    lines = [f"| score | {f'mean of {count} seeds' if count > 1 else 'one seed'} | chance |", "|---|---|---|"]
    for name, mean in data["mean"].items():
        spread, chance = data["deviation"][name], data["chance"].get(name)
        shown = _percent(mean) + (f" ± {100 * spread:.1f}" if spread is not None else "")
        lines.append(f"| `{name}` | {shown} | {_percent(chance)} |")
    return lines


def languages_table(data: dict[str, Any]) -> list[str]:
    """A line for each language: recall@1 both ways and exact captions, means over seeds."""
    runs, scores = data["runs"], ("image_to_text", "text_to_image", "captions")
    lines = ["| language | image → text | text → image | captions |", "|---|---|---|---|"]
    for language in data["languages"]:
        of_score = [[run[key] for run in runs if (key := f"{score}_{language}") in run] for score in scores]
        if any(of_score):  # some have no names of held-out images
            cells = [_percent(statistics.mean(each) if each else None) for each in of_score]
            alone = ", captions alone" if language in data["captions_alone"] else ""
            lines.append(f"| {language}{alone} | {' | '.join(cells)} |")
    return lines


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/multimodal-digits"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of all runs")
    parser.add_argument("--output", type=Path, required=True, help="written after each seed")
    options = parser.parse_args()
    settings = dict(pair.split("=", 1) for pair in options.set)
    steps = {} if options.steps is None else {"recipe.steps": str(options.steps)}
    configs = [
        load_run(overrides={
            "model": "multimodal-tiny", **settings, **steps,
            "seed": str(seed), "output": str(options.runs / f"seed-{seed}"),
        })
        for seed in range(options.seeds)
    ]  # fmt: skip
    runs = begun(options.output, configs[0].recipe.steps, settings)
    for config in configs:
        if all(run["seed"] != config.seed for run in runs):
            runs.append(evaluated(config))
            data = gathered(runs, config, settings)
            part = options.output.with_name(f"{options.output.name}.part")
            part.write_text(json.dumps(data, indent=1) + "\n")
            part.replace(options.output)
            print(json.dumps({"mean": data["mean"], "deviation": data["deviation"]}, indent=1), flush=True)


if __name__ == "__main__":
    main()
