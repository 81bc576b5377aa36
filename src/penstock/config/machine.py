"""The hardware that a model runs on: rates, sizes and latencies, from a datasheet or from
`penstock probe`."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from penstock.boundary.files import quoted, shown, write_text
from penstock.boundary.owners import distrust
from penstock.config.convert import Checked, Count, Natural, NotNegative, Positive, PositiveShare
from penstock.config.load import dump_toml, from_dict, read_file, to_dict
from penstock.config.shipped import read_shipped
from penstock.errors import ConfigError, EnvironmentProblem

_log = logging.getLogger(__name__)

ASSUMED_LAUNCH_SECONDS = 5e-6
"""Assumed cost of one eager operator on a GPU, if it was not measured."""


ProductForm = Literal[
    "forward", "input", "weight", "ragged", "vocabulary", "vocabulary_input", "vocabulary_weight", "stored",
    "packed",
]  # fmt: skip
"""The result of a linear layer's matrix product: its output, the gradient of its input, or that of its weight. The
three differ in the memory layout of their factors, and some CPU kernels are ten times slower for one than for another.
`ragged` is an output whose rows are not aligned to SIMD vectors. `vocabulary` and the two like it are the three
products of a layer with tens of thousands of outputs, whose weight and logits exceed every cache. `stored` is the
output of a layer with quantised weights in inference (`penstock.config.formats.PRODUCTS`), from fp32 inputs, including
rounding, scales and bias; `packed` that of a layer whose weights have the processor's layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSample:
    """One measured matrix product, (m, k) @ (k, n)."""

    dtype: str
    """The compute type, as in `Machine.peak_flops`; for `stored`, the weights' form: `int8`, `int8_weights` or
    `int4`."""
    m: Count
    n: Count
    k: Count
    flops_per_second: Positive
    form: ProductForm = "forward"

    @property
    def plain(self) -> bool:
        """Whether it multiplies weights as they are, not as they are stored for inference."""
        return self.form not in ("stored", "packed")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSample:
    """One measured operator other than a large matrix product. `tokens` and `features` (of a head) are for
    attention. `dtype` is a compute type, as in `Machine.peak_flops`."""

    name: str
    per_second: Positive
    """FLOP/s of the products for `attention`, `attention_backward`, `attention_token` (one query of each head),
    `attention_block` (the single call of int8 blocks) and `bmm`; bytes of weights that layers read from memory in
    inference for `reading`; elements for all others."""
    tokens: Natural = 0
    features: Natural = 0
    dtype: str = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Rates measured between processes; the fields are those of Machine."""

    collective_bytes_per_second: NotNegative
    collective_seconds: NotNegative = 0.0
    gather_bytes_per_second: NotNegative | None = None
    scatter_bytes_per_second: NotNegative | None = None
    send_bytes_per_second: NotNegative | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(LinkRates):
    """Rates measured between all processes of a run, and between pairs of them."""

    pairs: LinkRates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(Checked, where="machine"):
    """One kind of device and the links between such devices. All rates are per device and in SI units.

    `peak_flops` maps a compute type to its peak in FLOP/s: `fp32` (no tensor cores), `tf32`, `bf16`, `fp16`,
    `fp8`, `int8`, and on CPUs `fp32_medium` and `fp32_onednn` (see `plan.matmul`). The machine cannot compute in a type
    that is absent. A CPU has no datasheet peak, so its Machine holds the best rate of the probe both here and in
    `achievable_flops`.

    Rates by type, and of samples, are above 0. For other figures 0 means unknown. Raises ConfigError with every figure
    that is negative, infinite or not a number.
    """

    name: str
    device: Literal["cuda", "cpu", "other"]
    """`cuda` for GPUs, ROCm's among them. `other` can only be planned for, by the rules of GPUs."""
    avx512: bool = True
    """Whether a CPU has AVX-512; without it torch computes some bf16 operators differently."""
    kind: str = ""
    """The kind under which speedups of fused operators are stored: a CPU's instruction sets, such as `avx512_bf16`, or
    a GPU's name from its driver. If it is not known, `plan.fuse=auto` fuses nothing."""
    source: Literal["datasheet", "measured"]
    peak_flops: dict[str, Positive]
    achievable_flops: dict[str, Positive] = field(default_factory=dict)
    """Best known rate of a large matrix product, by type: from published sweeps, or measured here."""
    sustained_share: NotNegative = 0.0
    """Share of the best rate that the chip sustains under load; 0 if not measured."""
    memory_bytes: NotNegative = 0.0
    memory_bytes_per_second: NotNegative = 0.0
    launch_seconds: NotNegative = 0.0
    """Cost of one operator, however small."""
    operator_seconds: NotNegative = 0.0
    """Cost of one operator in a training step on a CPU, including its module and autograd; 0 if not
    measured."""
    page_seconds: NotNegative = 0.0
    """Time in which the operating system of a CPU clears and maps a 4 KiB page at its first access."""
    link_bytes_per_second: NotNegative | None = None
    """Rate to devices in the same node, in one direction."""
    devices_per_node: Count = 1
    node_bytes_per_second: NotNegative | None = None
    """Rate out of a node, over all its adapters."""
    leaf_nodes: Natural = 0
    """Nodes under one leaf switch, or on one set of rails; 0: all nodes."""
    spine_share: PositiveShare = 1.0
    """Share of a node's rate that is available between leaves, if they have fewer links up than down."""
    host_bytes_per_second: NotNegative | None = None
    """Rate between a device and its host's memory, in one direction."""
    collective_bytes_per_second: NotNegative | None = None
    """Measured bus bandwidth of all-reduce, if the probe ran distributed."""
    collective_seconds: NotNegative = 0.0
    """Time of a small all-reduce between processes; 0 if not measured. On CPUs it is the time that it adds to the
    products before and after it, including the wait for other ranks."""
    gather_bytes_per_second: NotNegative | None = None
    """Measured bus bandwidth of all-gather; that of all-reduce if not measured, as for the next two."""
    scatter_bytes_per_second: NotNegative | None = None
    """Measured bus bandwidth of reduce-scatter."""
    send_bytes_per_second: NotNegative | None = None
    """Measured rate from one process to another."""
    pairs: LinkRates | None = None
    """Rates measured between pairs of more than two processes, all pairs at once, as in tensor parallel groups of two.
    None if not measured."""
    alone_speedup: NotNegative = 0.0
    """Speedup of a process while the others wait, relative to all at once on a shared CPU; 0 if not measured."""
    multiprocessors: Natural | None = None
    """Number of thread blocks, one large tile each, that run at the same time."""
    power_watts: NotNegative | None = None
    gemm: tuple[GemmSample, ...] = ()
    """Measured shapes, for efficiency curves."""
    kernels: tuple[KernelSample, ...] = ()
    """Measured CPU operators that are slower than their memory traffic."""
    notes: tuple[str, ...] = ()

    def _problems(self) -> Iterator[str]:
        if not self.peak_flops:
            yield "machine.peak_flops is empty, but needs the rate of at least one type, such as bf16."

    def linked(self, link: LinkRates, ranks: int) -> Machine:
        """The same machine with the rates measured between `ranks` processes. On CPUs they count as one node, wherever
        they run, because all share the link."""
        node = max(ranks, self.devices_per_node) if self.device == "cpu" else self.devices_per_node
        measured: dict[str, Any] = {one.name: getattr(link, one.name) for one in fields(link)}
        return replace(self, **{"devices_per_node": node, "pairs": None} | measured)

    def __hash__(self) -> int:
        # The generated hash would fail on the dicts. Equality still compares every field.
        return hash((self.name, self.device, self.source))


@cache
def _datasheets() -> dict[str, tuple[Machine, tuple[str, ...]]]:
    """Each shipped Machine with the words that identify it in a device's name."""
    machines = {}
    for name, table in read_shipped("machines").items():
        values = {"name": name, "source": "datasheet", "launch_seconds": ASSUMED_LAUNCH_SECONDS, **table}
        words = tuple(values.pop("match"))
        machines[name] = from_dict(Machine, values, origin=f"machines.toml [{name}]"), words
    return machines


def known_machines() -> tuple[str, ...]:
    """Names of the shipped datasheet machines."""
    return tuple(_datasheets())


def load_machine(name_or_path: str | Path) -> Machine:
    """Load a shipped Machine by name (`h100`, `rtx-4090`, `RTX 4090` or `4090`), or one that `save_machine` stored (a
    path ending in .toml or .json).

    Raises `ConfigError` naming shipped machines of the same kind, or the problems of the file.
    """
    name = str(name_or_path)
    if name.lower() in _datasheets():
        return _datasheets()[name.lower()][0]
    if Path(name).suffix not in (".toml", ".json"):
        bare = _bare(name)
        if alike := [one for one in known_machines() if _bare(one) == bare]:
            return _datasheets()[alike[0]][0]
        kin = [one for one in known_machines() if len(bare) > 1 and _bare(one).startswith(bare)]
        kin = kin or [one for one in known_machines() if bare.startswith(_bare(one))]
        kin = kin or difflib.get_close_matches(bare, known_machines(), n=1, cutoff=0.8)
        near = f" Did you mean {' or '.join(map(repr, kin))}?" if kin else ""
        raise ConfigError(
            f"There is no machine {quoted(name)}.{near} Give one of "
            f"{', '.join(known_machines())}, or the path of a file that `penstock probe --output FILE` wrote."
        )
    return from_dict(Machine, read_file(name, "The machine file"), origin=shown(name))


def _bare(name: str) -> str:
    """The name of a chip without other words: `4090` from `NVIDIA GeForce RTX 4090`."""
    return re.sub(r"nvidia|amd|geforce|instinct|tesla|rtx|[^a-z0-9]", "", name.lower()[:200])


def save_machine(machine: Machine, path: str | Path) -> Path:
    """Write `machine` as JSON or TOML, depending on the suffix of `path`. Creates its folders and returns
    it."""
    path = Path(path)
    require_machine_file(path)
    text = dump_toml(machine) if path.suffix == ".toml" else json.dumps(to_dict(machine), indent=1) + "\n"
    write_text(path, text)
    return path


def require_machine_file(path: Path) -> None:
    """Raise ConfigError for a path in which no machine can be stored."""
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"A machine is stored as .toml or .json, so {path} must end in one of them.")


def cache_folder(name: str = "") -> Path:
    """The folder for results that are measured, compiled or tokenised once, or the folder `name` in it:
    `$PENSTOCK_CACHE`, `$XDG_CACHE_HOME/penstock` or `~/.cache/penstock`. If other users may write there, a folder of
    this user among the temporary files is used instead, and the log says so. Raises EnvironmentProblem if others may
    write that one, too.
    """
    if chosen := os.environ.get("PENSTOCK_CACHE"):
        return _trusted(Path(chosen), name)
    base = os.environ.get("XDG_CACHE_HOME")
    return _trusted((Path(base) if base else Path.home() / ".cache") / "penstock", name)


@lru_cache(maxsize=64)
def _trusted(cache: Path, name: str) -> Path:
    if not (reason := distrust(cache / name)):
        return cache / name
    own = Path(tempfile.gettempdir()) / f"penstock-{os.geteuid()}"
    with contextlib.suppress(OSError):
        own.mkdir(mode=0o700, exist_ok=True)
    if again := distrust(own / name):
        raise EnvironmentProblem(
            f"No cache can be trusted: {reason}, and {again}. Set PENSTOCK_CACHE to a folder of your own."
        )
    _log.warning(
        "The cache %s is not used, because %s. %s is used instead.", cache / name, reason, own / name
    )
    return own / name


def is_trusted(file: Path) -> bool:
    """Whether a cached file exists and only this user or root can have written it; if not, the log says why."""
    if reason := distrust(file):
        _log.warning("%s is not used, because %s.", file, reason)
    return file.is_file() and not reason


def cache_path(name: str) -> Path:
    """The file in which the measured machine `name` is stored."""
    return cache_folder("machines") / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def cached_machine(name: str | None = None) -> Machine | None:
    """The measured machine `name` from the cache, or the newest of all; None if none can be read.

    An unreadable file counts as missing: measuring again replaces it.
    """
    if name is not None:
        paths = [cache_path(name)]
    else:
        folder = cache_folder("machines")
        paths = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in paths:
        if is_trusted(path):
            try:
                return load_machine(path)
            except ConfigError:
                continue
    return None


def match_datasheet(device_name: str, memory_bytes: float) -> Machine | None:
    """The shipped Machine that matches a device's name (`NVIDIA A100-SXM4-80GB`), or None.

    `memory_bytes` decides between sizes of the same chip. The result keeps the datasheet's figures.
    """
    words = re.split(r"[^a-z0-9]+", device_name.lower())
    if "laptop" in words:  # another chip under the same name
        return None
    fitting = [machine for machine, match in _datasheets().values() if any(word in words for word in match)]
    if not fitting:
        return None
    best = min(fitting, key=lambda machine: abs(machine.memory_bytes - memory_bytes))
    return replace(best, notes=(*best.notes, f"matched by device name {device_name!r}"))
