"""What a model runs on: rates, sizes and latencies, from a datasheet or measured by `penstock probe`."""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from penstock.config.convert import check_fields, field_types, nearest
from penstock.errors import ConfigError, EnvironmentProblem

ASSUMED_LAUNCH_SECONDS = 5e-6
"""Cost of one eager operator on a GPU, where nobody has measured it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSample:
    """One measured matrix product, (m, k) @ (k, n)."""

    dtype: str
    m: int
    n: int
    k: int
    flops_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSample:
    """One measured operator that is no large matrix product. `tokens` and `features` of a head are attention's."""

    name: str
    per_second: float
    """FLOPs of its products for `attention`, `attention_backward` and `bmm`; elements for all others."""
    tokens: int = 0
    features: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of device, and how such devices are linked. All rates are per device and in SI units.

    `peak_flops` maps a compute type to its peak in FLOP/s: `fp32` (no tensor cores), `tf32`, `bf16`, `fp16`, `fp8`,
    `int8`, and on CPUs `fp32_medium`. A type that is absent cannot be computed in on this machine. A CPU has no
    datasheet peak, so there a measured Machine holds the best rate of its probe here and in `achievable_flops` alike.

    Rates by type and of samples are above 0. Of the other figures 0 means that it is not known. Raises ConfigError with
    every figure that is negative, infinite or not a number.
    """

    name: str
    device: Literal["cuda", "cpu"]
    source: Literal["datasheet", "measured"]
    peak_flops: dict[str, float]
    achievable_flops: dict[str, float] = field(default_factory=dict)
    """Best rate ever seen of a large matrix product, by type: published sweeps, or measured here."""
    memory_bytes: float = 0.0
    memory_bytes_per_second: float = 0.0
    launch_seconds: float = 0.0
    """What one more operator costs, however small."""
    operator_seconds: float = 0.0
    """The same of an operator in a training step on a CPU, with its module and autograd's bookkeeping; 0 where it was
    not measured."""
    page_seconds: float = 0.0
    """What a CPU's kernel takes to clear and map one page of 4 KiB on its first touch."""
    link_bytes_per_second: float | None = None
    """To devices in the same node, one direction."""
    devices_per_node: int = 1
    node_bytes_per_second: float | None = None
    """Out of a node, over all its adapters."""
    host_bytes_per_second: float | None = None
    """Between a device and the memory of its host, one direction."""
    collective_bytes_per_second: float | None = None
    """Measured bus bandwidth of all-reduce, where a probe ran distributed."""
    multiprocessors: int | None = None
    """Blocks of threads, one large tile each, that run at once."""
    power_watts: float | None = None
    gemm: tuple[GemmSample, ...] = ()
    """Measured shapes, for efficiency curves."""
    kernels: tuple[KernelSample, ...] = ()
    """Measured operators of a CPU that take longer than their memory traffic."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = check_fields(self, "machine")
        if not problems:
            problems = [*self._figure_problems()]
        if problems:
            raise ConfigError(problems)

    def _figure_problems(self) -> Iterator[str]:
        for name in field_types(Machine):
            value = getattr(self, name)
            least = 1 if name == "devices_per_node" else 0
            if isinstance(value, int | float) and not least <= value < math.inf:
                unknown = "" if least else ", and 0 where it is not known"
                yield f"machine.{name} is {value}, but must be finite and at least {least}{unknown}."
        if not self.peak_flops:
            yield "machine.peak_flops is empty, but needs the rate of one type at least, such as bf16."
        rates = {
            f"{name}.{kind}": rate
            for name in ("peak_flops", "achievable_flops")
            for kind, rate in getattr(self, name).items()
        }
        rates |= {f"gemm[{i}].flops_per_second": one.flops_per_second for i, one in enumerate(self.gemm)}
        rates |= {f"kernels[{i}].per_second": one.per_second for i, one in enumerate(self.kernels)}
        for name, rate in rates.items():
            if not 0 < rate < math.inf:
                yield f"machine.{name} is {rate}, but must be finite and above 0; leave out what is not known."
        sizes = {
            f"gemm[{i}].{side}": (getattr(one, side), 1) for i, one in enumerate(self.gemm) for side in "mnk"
        }
        sizes |= {
            f"kernels[{i}].{size}": (getattr(one, size), 0)
            for i, one in enumerate(self.kernels)
            for size in ("tokens", "features")
        }
        for name, (size, least) in sizes.items():
            if size < least:
                yield f"machine.{name} is {size}, but must be at least {least}."

    def __hash__(self) -> int:
        # The dicts would make the generated hash fail; equality still compares every field.
        return hash((self.name, self.device, self.source))


@cache
def _datasheets() -> dict[str, tuple[Machine, tuple[str, ...]]]:
    """Each shipped Machine, and the words by which a device's own name is recognised as it."""
    from penstock.config.load import from_dict

    text = resources.files("penstock.config").joinpath("presets/machines.toml").read_text(encoding="utf-8")
    machines: dict[str, tuple[Machine, tuple[str, ...]]] = {}
    for name, table in tomllib.loads(text).items():
        values: dict[str, Any] = {
            "name": name,
            "source": "datasheet",
            "launch_seconds": ASSUMED_LAUNCH_SECONDS,
        }
        words = tuple(table.pop("match"))
        machines[name] = (from_dict(Machine, values | table, origin=f"machines.toml [{name}]"), words)
    return machines


def known_machines() -> tuple[str, ...]:
    """Names of the shipped datasheet machines."""
    return tuple(_datasheets())


def load_machine(name_or_path: str | Path) -> Machine:
    """A shipped Machine by name (`h100`), or one that `save_machine` stored (a path ending in .toml or .json).

    Raises `ConfigError` naming the nearest shipped machine, or the problems of the file.
    """
    from penstock.config.load import from_dict, read_file

    name = str(name_or_path)
    if name.lower() in _datasheets():
        return _datasheets()[name.lower()][0]
    if Path(name).suffix not in (".toml", ".json"):
        raise ConfigError(
            f"There is no machine {name!r}.{nearest(name.lower(), known_machines())} Give one of "
            f"{', '.join(known_machines())}, or the path of a file that `penstock probe --output FILE` wrote."
        )
    return from_dict(Machine, read_file(name), origin=name)


def save_machine(machine: Machine, path: str | Path) -> Path:
    """Write `machine` as JSON or TOML, by the ending of `path`, whose folders are made; gives the path back."""
    from penstock.config.load import dump_toml, to_dict

    path = Path(path)
    if path.suffix == ".toml":
        text = dump_toml(machine)
    elif path.suffix == ".json":
        text = json.dumps(to_dict(machine), indent=1) + "\n"
    else:
        raise ConfigError(f"A machine is stored as .toml or .json, so {path} must end in one of them.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written beside and renamed, so that a process that reads at the same time sees the old or the new file whole.
        partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise EnvironmentProblem(
            f"The machine file {path} cannot be written: {error.strerror}. Choose another path, or set PENSTOCK_CACHE "
            "to a folder that can be written."
        ) from error
    return path


def cache_folder() -> Path:
    """Where measurements are kept: `$PENSTOCK_CACHE`, `$XDG_CACHE_HOME/penstock` or `~/.cache/penstock`."""
    if folder := os.environ.get("PENSTOCK_CACHE"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "penstock"


def cache_path(name: str) -> Path:
    """The file in which the measured machine `name` is kept."""
    return cache_folder() / "machines" / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def cached_machine(name: str | None = None) -> Machine | None:
    """The measured machine `name` from the cache, or the newest of all; none if there is none that can be read.

    A file that cannot be read is as good as none: measuring again replaces it.
    """
    if name is not None:
        paths = [cache_path(name)]
    else:
        folder = cache_folder() / "machines"
        paths = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in paths:
        if path.is_file():
            try:
                return load_machine(path)
            except ConfigError:
                continue
    return None


def match_datasheet(device_name: str, memory_bytes: float) -> Machine | None:
    """The shipped Machine that a device is by its own name (`NVIDIA A100-SXM4-80GB`), or none.

    `memory_bytes` decides between sizes of the same chip; the result keeps the datasheet's figures.
    """
    words = re.split(r"[^a-z0-9]+", device_name.lower())
    fitting = [machine for machine, match in _datasheets().values() if any(word in words for word in match)]
    if not fitting:
        return None
    best = min(fitting, key=lambda machine: abs(machine.memory_bytes - memory_bytes))
    return replace(best, notes=(*best.notes, f"matched by device name {device_name!r}"))
