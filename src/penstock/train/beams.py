"""Sequence-level distillation: a teacher's translations in place of the targets (Kim and Rush, "Sequence-Level
Knowledge Distillation", EMNLP 2016, section 3.2).

Shapes: N samples, T tokens of the longest target.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.boundary.files import own_file
from penstock.checkpoint.coordinator import main_first
from penstock.config.decoding import Decoding
from penstock.config.plan import Plan
from penstock.config.run import RunConfig
from penstock.data import Source
from penstock.data.text.rows import RowSource
from penstock.errors import ConfigError
from penstock.infer.generator import Generator
from penstock.launch.heartbeat import beat
from penstock.leftovers import replace_file

FILE = "taught.npz"
"""File in a run's folder that holds the teacher's translations."""
_BATCH = 64


def taught_by_beams(source: Source, config: RunConfig, device: torch.device) -> Source:
    """The training data of a run with the teacher's translations as targets, which rank 0 makes and writes to the run's
    folder; a run that goes on reads them again. All ranks must call this.

    Raises ConfigError where the data are no translations, or the teacher cannot translate them.
    """
    if not isinstance(source, RowSource) or source.form != "translation":
        raise ConfigError(
            "recipe.teacher_beams has the teacher translate the training data, but this task reads no translations; "
            "leave it out."
        )
    recipe = config.recipe
    key = json.dumps([recipe.teacher, recipe.teacher_beams, source.name, len(source), source.target_length])
    file = own_file(config.output, FILE)

    def make() -> None:
        if _read(file, key) is not None:
            return
        sources, targets = _translate(source, config, device)

        def write(path: Path) -> None:
            with path.open("wb") as opened:
                np.savez(opened, sources=sources, targets=targets, key=np.array(key))

        replace_file(file, write)

    main_first(make)
    made = _read(file, key)
    assert made is not None
    return source.with_targets(*made)


def _read(file: Path, key: str) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    """Lengths of sources (N,) and targets (N, 1 + T); None where they were not made for `key`."""
    if not file.is_file():
        return None
    with np.load(file, allow_pickle=False) as stored:
        return (stored["sources"], stored["targets"]) if str(stored["key"]) == key else None


def _translate(
    source: RowSource, config: RunConfig, device: torch.device
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    assert config.recipe.teacher is not None
    assert source.lengths is not None
    sources = np.zeros(len(source), np.int32)
    targets = np.zeros((len(source), 1 + source.target_length), np.int32)
    targets[:, 1:] = source.tokenizer.pad
    order = np.argsort(source.lengths, kind="stable")
    with Generator(config.recipe.teacher, Plan(), device=device) as teacher:
        room = teacher.model.graph.written[-1].most - 1
        decoding = Decoding(beams=config.recipe.teacher_beams, max_tokens=min(source.target_length, room))
        for begin in range(0, len(order), _BATCH):
            beat(0)
            places = order[begin : begin + _BATCH]
            rows: Any = np.zeros(len(places), source.sample)
            source.read_into(places, rows)
            sources[places] = rows["source_length"]
            prompts = [row["source"][: row["source_length"]].tolist() for row in rows]
            labels = (
                [source.label_names[row["label"]] for row in rows] if teacher.model.graph.routed else None
            )
            for place, translation in zip(
                places, teacher.generate(prompts, decoding, label=labels), strict=True
            ):
                end = source.tokenizer.end
                ended = end is not None and translation.finished != "length"
                ids = np.array([*translation.ids, *([end] if ended else [])], np.int32)[
                    : source.target_length
                ]
                targets[place, 0] = len(ids)
                targets[place, 1 : 1 + len(ids)] = ids
    return sources, targets
