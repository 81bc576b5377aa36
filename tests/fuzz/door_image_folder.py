"""A folder of images: whatever lies in it, under both policies, read for training and packed."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from fuzz.door import Case, Door
from helpers.images import encoded, smooth
from penstock.config.run import DataConfig
from penstock.data import open_source
from penstock.data.packing import Packing, pack_source
from penstock.errors import PenstockError

_KINDS = "ifdplczsetoX"
"""An image, a folder with one, a dangling link …: see `_make`."""
_IMAGE = encoded(smooth(20, 20))
_NAMES = (
    "a.jpg",
    "b.JPG",
    "c.png",
    "\udcff.jpg",
    "\x1b[2J.jpg",
    "n" * 250 + ".jpg",
    "d.txt",
    "e.tar",
    ".hidden.jpg",
)


def _seeds() -> dict[str, bytes]:
    """The policy, then an entry a line: class, name and kind by number."""
    return {"fail": b"000i\n001i\n100i\n101i\n", "skip": b"000i\n011i\n100i\n101d\n111i\n"}


def _enter(policy: str, data: bytes) -> None:
    logging.disable(logging.CRITICAL)
    for folder in ("set", "pack"):
        shutil.rmtree(folder, ignore_errors=True)
    os.mkdir("set")
    for line in data[:2000].split(b"\n"):
        with contextlib.suppress(OSError, ValueError):
            _add(line.ljust(4, b"0"))
    policy = "skip" if policy == "skip" else "fail"
    problem = None
    try:
        source = open_source(
            DataConfig(source="imagefolder:set", bad_images=policy), split="train", image_size=28
        )
        source.read(np.arange(min(len(source), 8)))
    except PenstockError as error:
        problem = error  # packing is tried too
    pack_source("set", "pack", Packing(size=16, bad_images=policy, threads=1))
    if problem is not None:
        raise problem


def _add(line: bytes) -> None:
    group, name = Path(f"set/{line[0] % 4}"), _NAMES[line[1] % len(_NAMES)]
    kind = chr(line[3]) if chr(line[3]) in _KINDS else _KINDS[line[3] % len(_KINDS)]
    if line[2] % 5 == 1:
        group = Path("set") / ("train", "val")[line[2] % 2] / group.name
    elif line[2] % 5 == 2:
        group = Path("set")
    group.mkdir(parents=True, exist_ok=True)
    path = group / name
    if os.path.lexists(path):
        return  # writing to a pipe would wait
    if kind == "d":
        path = path.with_suffix("") / "in.jpg"
        path.parent.mkdir()
        kind = "i"
    match kind:
        case "i":
            path.write_bytes(_IMAGE)
        case "f":
            os.mkfifo(path)
        case "p":
            path.mkdir()
        case "l":
            path.symlink_to("nowhere")
        case "c":
            path.symlink_to(path.name)
        case "z":
            path.symlink_to("/dev/zero")
        case "s":
            with path.open("wb") as file:
                file.truncate(3 << 30)
        case "e":
            path.write_bytes(b"")
        case "t":
            path.write_bytes(_IMAGE[: len(_IMAGE) // 2])
        case "o":
            path.symlink_to("..")
        case "X":
            path.write_bytes(_IMAGE)
            path.chmod(0)


def _made() -> st.SearchStrategy[Case]:
    line = st.lists(st.integers(0, 11), min_size=4, max_size=4).map(bytes)
    return st.tuples(st.sampled_from(("fail", "skip")), st.lists(line, max_size=12).map(b"\n".join))


DOOR = Door(seeds=_seeds, enter=_enter, made=_made)
