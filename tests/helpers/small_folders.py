"""Folders of small models, with random weights or trained on digits, as a run leaves them, and quantised."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import penstock
from penstock.compress.data import QuantiseData
from penstock.compress.quantise import quantise_folder
from penstock.config.model import MultimodalConfig, UniversalConfig, with_stacks
from penstock.config.quantise import QuantiseOptions
from penstock.config.run import DataConfig
from penstock.data import Loader
from penstock.data.open import open_source
from penstock.data.text.tokenizers import Bytes
from penstock.export.export import inputs_of
from penstock.tasks import classification_loss
from penstock.train.prepare import write_beside


def folder(name: str, where: Path, rows: int = Bytes.size, **changes: Any) -> Path:
    """A small model of a family with random weights, and beside it a tokenizer, as a run leaves them."""
    torch.manual_seed(0)
    model: Any = penstock.PRESETS[name]
    depth = 1 if isinstance(model, UniversalConfig | MultimodalConfig) else 2
    sizes = {"width": 32, "depth": depth, "heads": 2, "kv_heads": None, "mlp_width": 64} | changes
    outer = {"vocabulary": rows, "sequence": 48}
    if isinstance(model, penstock.ViTConfig):
        outer = {"image_size": 32, "patch_size": 8, "classes": 5}
    elif isinstance(model, penstock.Seq2SeqConfig):
        outer["decoder_sequence"] = 48
    config = dataclasses.replace(
        with_stacks(model, lambda stack: dataclasses.replace(stack, **sizes)), **outer
    )
    if not isinstance(config, penstock.ViTConfig):
        write_beside(config, cast(Any, SimpleNamespace(tokenizer=Bytes())), where / "words")
    penstock.save_pretrained(penstock.create(config), where / name, beside=where / "words")
    return where / name


def quantised(name: str, where: Path, **options: Any) -> Path:
    """A small quantised model of a family, in int8 unless `options` say otherwise, calibrated with drawn inputs."""
    whole = folder(name, where)
    model = penstock.from_pretrained(whole)
    given = [tuple(inputs_of(model, *sizes).values()) for sizes in ((4, 20, 12), (3, 30, 7))]
    wanted = QuantiseOptions(**{"format": "int8"} | options)
    quantise_folder(whole, where / "few bits", wanted, QuantiseData(lambda: given))
    return where / "few bits"


def learn_digits(folder: Path) -> None:
    """Leave a small ViT that was trained on digits in a folder."""
    preset: Any = penstock.PRESETS["vit-digits"]
    config = dataclasses.replace(preset, width=48, depth=2, heads=2, mlp_width=96)
    torch.manual_seed(0)
    model, source = penstock.create(config), open_source(DataConfig(), split="train", channels=1)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with Loader(source, classification_loss.prepare(source, config), batch=96) as loader:
        for _, batch in zip(range(180), loader):
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(model(batch.images), batch.targets))
            optimizer.step()
    penstock.save_pretrained(model.eval(), folder)


def every_digit() -> tuple[Tensor, Tensor]:
    """The 1,797 images (N, 1, H, W) of both splits, and their classes (N,)."""
    images, classes = list[Tensor](), list[Tensor]()
    data = DataConfig()
    for source in (
        open_source(data, split="train", channels=1), open_source(data, split="val", channels=1),
    ):  # fmt: skip
        prepare = classification_loss.prepare(source, penstock.PRESETS["vit-digits"])
        with Loader(source, prepare, batch=64, endless=False) as loader:
            for batch in loader:
                images.append(batch.images)
                classes.append(batch.targets)
    return torch.cat(images), torch.cat(classes)
