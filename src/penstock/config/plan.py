"""How a model runs. A Plan prints and parses as one line, and is stored with every run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from penstock.boundary.files import quoted, shown
from penstock.boundary.trees import parse_tree
from penstock.config.convert import BadValue, Checked, Count, Range, convert, nearest, present, word
from penstock.config.formats import HalfDtype, Products
from penstock.config.fused import Fuse
from penstock.config.kinds import field_types
from penstock.config.load import MOST_PROBLEMS, dump_toml, from_dict
from penstock.config.optimizers import Algorithm as Algorithm
from penstock.config.optimizers import OptimizerForm as OptimizerForm
from penstock.config.removed import removal
from penstock.errors import ConfigError

Precision = Literal["O0", "O1", "O2", "O3"]
Norms = Literal["fp32", "half"]
Matmul = Literal["highest", "probed", "high", "medium"]
TokenOrder = Literal["batch_first", "batch_second"]
AttentionBackend = Literal["auto", "plain", "sdpa", "flash", "efficient", "cudnn", "math", "native"]
WITH_SINKS: tuple[AttentionBackend, ...] = ("auto", "sdpa", "plain")
"""Backends that support attention sinks."""
LossForm = Literal["whole", "chunked"]
Padding = Literal["keep", "remove"]
ExpertProducts = Literal["grouped", "loop"]
Compile = Literal["none", "blocks", "whole", "graphs"]
HostMemory = Literal["release", "keep"]
Sharding = Literal["ddp", "zero1", "zero2", "fsdp", "hsdp"]
ScheduleKind = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Recompute = Literal["none", "selective", "elementwise", "operators", "early", "full", "budget"]
ContextExchange = Literal["ring", "gather"]
GradientType = Literal["weights", "fp32", "half"]
GatherType = Literal["level", "products"]
TensorOverlap = Literal["none", "weights", "all"]
Offload = Literal["none", "optimizer", "activations"]

BASELINE = "baseline"
"""The line for a Plan of defaults."""


Effect = Literal["nothing", "rounding", "batch", "precision", "model"]
EFFECTS: dict[Effect, str] = {
    "nothing": "Leaves results as they are.",
    "rounding": "Changes results only by rounding.",
    "batch": "Changes results only by rounding if the global batch stays.",
    "precision": "Changes results within the rounding of its types.",
    "model": "Changes results.",
}
"""The effects of a changed setting on results, from the least to the most."""

_NOTHING, _ROUNDING, _BATCH, _PRECISION, _MODEL = ({"effect": effect} for effect in EFFECTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Checked, where="plan"):
    """How a model runs on a machine. The defaults are the plain baseline that optimisations are compared
    with."""

    RENAMED: ClassVar[dict[str, str]] = {"layout": "token_order", "fp8": "products"}
    """Old names of settings, mapped to their present names."""
    REWORDED: ClassVar[dict[str, dict[str, str]]] = {
        "fp8": {"rowwise": "fp8"}
        | dict.fromkeys(("true", "tensorwise"), "fp8_tensorwise")
        | dict.fromkeys(("false", "none"), "plain")
    }
    """For old names of settings, old values mapped to their present words."""

    KEPT: ClassVar[tuple[str, ...]] = ("micro_batch", "accumulate")
    """The batch of a step: a line with neither keeps the values of a preset or file."""

    precision: Precision = field(default="O0", metadata=_PRECISION | {"O3": "model"})
    """O0: fp32 throughout. O1: autocast, fp32 weights. O2: weights, activations and gradients in `dtype`, and fp32
    master weights in the optimizer. O3: weights, activations, gradients and optimizer in `dtype`."""
    dtype: HalfDtype = field(default="bf16", metadata=_PRECISION)
    """The half-width type that O1, O2 and O3 compute in."""
    norms: Norms = field(default="fp32", metadata=_PRECISION)
    """Type of the weights and the arithmetic of norms with O2; they are fp32 with O0 and O1, half with O3."""
    matmul: Matmul = field(default="highest", metadata=_PRECISION)
    """Precision of fp32 matrix products, under torch's names: `high` is TF32 on a GPU. On a CPU `medium` lets oneDNN
    multiply: in bf16 on a processor with AMX, in fp32 on all others. `probed` stays in fp32: on a CPU each product of
    a linear layer takes the library, MKL or oneDNN, that was measured to be faster for its shape."""
    optimizer: OptimizerForm = field(default="loop", metadata=_ROUNDING)
    """How the update is launched: once per tensor, per chunk of tensors, per group (fused), or once per flat
    buffer of each group and dtype."""
    token_order: TokenOrder = field(
        default="batch_first", metadata=_ROUNDING | {"switch": "has no token order but batch_first"}
    )
    """The order of dimensions inside the blocks: (batch, sequence, width) or (sequence, batch, width)."""
    attention: AttentionBackend = field(
        default="sdpa", metadata=_ROUNDING | {"switch": "never calls torch's attention, or not in this form"}
    )
    """`sdpa` lets torch choose; `plain` is two matrix products; `auto` is Penstock's choice by device, dtype
    and sequence length; `native` is Penstock's kernel in C++ for CPUs that multiply bf16 in AVX-512; the others fix one
    backend of SDPA."""
    loss: LossForm = field(default="whole", metadata=_ROUNDING | {"switch": "does not make its loss itself"})
    """How the loss over a vocabulary is computed: from all logits together, or in chunks of rows together with their
    gradients, so that logits take at most 64 MiB, on a GPU 1 GiB."""
    padding: Padding = field(
        default="keep", metadata=_ROUNDING | {"switch": "computes all tokens that it is given"}
    )
    """Whether an encoder computes padding: `remove` saves its share of the tokens of a batch. On a CPU, and on a GPU
    with `attention=flash`, attention then skips padding too; elsewhere only attention still computes it."""
    experts: ExpertProducts = field(
        default="grouped", metadata=_ROUNDING | {"switch": "has no mixture of experts"}
    )
    """How experts are multiplied: all together in grouped products, if torch has them, or one after the other."""
    fuse: tuple[Fuse, ...] = field(
        default=(), metadata=_ROUNDING | {"training": "fuses what training computes; leave plan.fuse out"}
    )
    """Operators that are fused by kernels of Penstock's own, separated by commas: `auto` chooses those that were
    measured to be faster on this kind of machine."""
    compile: Compile = field(default="none", metadata=_ROUNDING)
    """Scope of torch.compile: nothing, each repeated block (`blocks`; they share one compilation), the whole model, or
    the whole model with its forward and backward passes recorded as CUDA graphs (`graphs`)."""
    host_memory: HostMemory = field(default="release", metadata=_NOTHING)
    """Whether memory that a step frees on a CPU is returned to the kernel or stays mapped for the next
    step."""
    micro_batch: Count = field(default=8, metadata=_BATCH)
    """Samples per forward pass on one device."""
    accumulate: Count = field(default=1, metadata=_BATCH)
    """Forward and backward passes per optimizer step; in a pipeline, its number of micro-batches."""
    dp: Count = field(default=1, metadata=_BATCH)
    """Data parallel degree: the number of replicas, whole or sharded, which use different samples."""
    sharding: Sharding = field(default="ddp", metadata=_ROUNDING | {
        "training": "shards weights that every token needs whole; use plan.sharding=ddp, and plan.tp to split layers"
    })  # fmt: skip
    """State that the replicas shard: nothing (ddp), the optimizer's states (zero1), gradients too (zero2), weights too
    (fsdp), or all of these within groups of `shard` replicas (hsdp)."""
    shard: Count = field(default=1, metadata=_ROUNDING)
    """Number of replicas in a group that shards everything, with sharding=hsdp."""
    gather: GatherType = field(default="level", metadata=_PRECISION)
    """Type in which sharded weights are gathered: that of the level of precision, or, for linear layers with one fp8
    scale per weight, the fp8 of their products, which is half the bytes."""
    tp: Count = field(default=1, metadata=_ROUNDING)
    """Tensor parallel degree: number of devices over which each block's matrices are split."""
    sp: bool = field(default=False, metadata=_ROUNDING | {
        "training": "splits tokens between split layers, and they are made one at a time; use plan.sp=false"
    })  # fmt: skip
    """Sequence parallelism: activations that tensor parallelism does not split are split over tokens (Korthikanti et
    al. 2022)."""
    pp: Count = field(default=1, metadata=_ROUNDING)
    """Number of pipeline stages."""
    schedule: ScheduleKind = field(default="1f1b", metadata=_ROUNDING)
    """Order of forward and backward passes in the pipeline."""
    virtual: Count = field(default=1, metadata=_ROUNDING)
    """Model chunks per pipeline stage; above 1 with schedule=interleaved or zero_bubble only."""
    cp: Count = field(default=1, metadata=_ROUNDING | {
        "training": "splits the tokens of a text, which are made one at a time; use plan.tp or plan.dp"
    })  # fmt: skip
    """Context parallel degree: number of devices over which a sample's tokens are split."""
    cp_exchange: ContextExchange = field(default="ring", metadata=_ROUNDING)
    """How these devices exchange keys and values: passed around a ring while attention computes, or all gathered
    before it."""
    ep: Count = field(default=1, metadata=_ROUNDING)
    """Expert parallel degree: number of devices, out of the dp times cp times tp of a stage, over which experts are
    split. Above 1 each expert is on one device as a whole, and tokens are sent there."""
    recompute: Recompute = field(default="none", metadata=_NOTHING)
    """Part of the forward pass that the backward pass recomputes: nothing; the attention scores (selective); norms,
    activations and all else but attention and matrix products (elementwise), or every second product with weights and
    those of plain attention too (operators: torch's per-operator policy); or each block from its input, either whole
    (full) or until everything needed is available (early: torch's own checkpointing, which omits a block's last
    product). `budget` chooses for each block the parts that free the most bytes for the least computation, until
    activations fit in `budget`."""
    recompute_every: Annotated[float, Range(1, 1 << 14)] = field(default=1.0, metadata=_NOTHING)
    """Every n-th block recomputes. n may be fractional: 1.25 is four of five blocks, 2.5 two of five."""
    budget: Annotated[float, Range(0, 1 << 20)] = field(default=0.0, metadata=_NOTHING)
    """GiB that the activations of one device's blocks may take, with recompute=budget; all micro-batches that a
    pipeline stage holds at one time are counted."""
    products: Products = field(default="plain", metadata=_MODEL)
    """How linear layers multiply: in their own types (`plain`), or inside the blocks in fp8, with one scale per row of
    what is summed over (`fp8`) or per tensor (`fp8_tensorwise`), or in int8, with gradients of weights in bf16 (`int8`)
    or not (`int8_all`), or with one learned scale for a layer's inputs (`int8_pact`). The other forms are for
    inference."""
    algorithm: Algorithm = field(default="adamw", metadata=_MODEL)
    """The optimizer, which a run sets as `recipe.optimizer`. Its state, memory traffic and computation are predicted
    from the table `penstock.config.optimizers`."""
    gradients: GradientType = field(default="weights", metadata=_PRECISION | {"trains": "weights"})
    """Type in which gradients are accumulated and reduced: the type of the weights that the optimizer updates (fp32 if
    these are sharded), fp32, or half precision."""
    offload: Offload = field(default="none", metadata=_ROUNDING)
    """Tensors kept in host memory."""
    overlap: bool = field(default=True, metadata=_NOTHING | {"trains": True})
    """Whether data parallel collectives overlap with forward and backward, where possible."""
    tp_overlap: TensorOverlap = field(default="weights", metadata=_ROUNDING | {"trains": "weights"})
    """Which tensor parallel collectives overlap with computation: none, those that can overlap with gradients of
    weights, or all that can."""

    @classmethod
    def parse(cls, line: str) -> Plan:
        """The Plan that a line such as `precision=O1 optimizer=fused` describes; other fields keep their
        defaults.

        Words are separated by white space, in any order; `baseline` and an empty line are the defaults. Raises
        `ConfigError` with every problem of the line.
        """
        return cls(**cls._values(line))

    @classmethod
    def named(cls, line: str) -> frozenset[str]:
        """The settings that a line for `parse` names, including those set to their default. Raises as
        `parse`."""
        return frozenset(cls._values(line))

    @classmethod
    def _values(cls, line: str) -> dict[str, Any]:
        """The settings of a line by name."""
        kinds = field_types(cls)
        values: dict[str, Any] = {}
        problems: list[str] = []
        if ";" in line or re.search(r",(?!\w+([\s,]|$))", line):  # `fuse=a,b` is a list
            spaced = " ".join(line.replace(",", " ").replace(";", " ").split())
            raise ConfigError(
                f"A plan's settings are separated by spaces, not by commas; write {quoted(spaced, 400)}."
            )
        for part in line.split():
            if len(problems) == MOST_PROBLEMS:
                break
            if part == BASELINE:
                continue
            name, equals, text = part.partition("=")
            name, text = present(cls, name, text)
            if not equals:
                problems.append(
                    f"The plan's word {quoted(part)} is not a setting; write key=value, or {BASELINE} for the defaults."
                )
            elif (refusal := removal(cls, name, text, f"plan.{name}")) is not None:
                problems += [refusal] if refusal else []
            elif name not in kinds:
                problems.append(
                    f"plan.{shown(name)} is not a setting.{nearest(name, kinds)} A plan takes {', '.join(kinds)}."
                )
            elif name in values:
                problems.append(f"plan.{name} is given twice; keep one.")
            else:
                try:
                    values[name] = convert(text, kinds[name], text=True)
                except BadValue as bad:
                    problems.append(bad.sentence(f"plan.{name}"))
        if problems:
            raise ConfigError(problems)
        return values

    def line(self) -> str:
        """The Plan as one line: key=value words for fields that differ from the defaults, or `baseline`.

        `Plan.parse` returns an equal Plan.
        """
        words = [
            f"{f.name}={word(getattr(self, f.name))}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return " ".join(words) or BASELINE

    def __str__(self) -> str:
        return self.line()

    def to_toml(self) -> str:
        """Every field as TOML; `from_toml` returns an equal Plan."""
        return dump_toml(self)

    @classmethod
    def from_toml(cls, text: str) -> Plan:
        """The Plan in a TOML text, at its top level or in one table `plan`.

        Absent fields keep their defaults. Raises `ConfigError`.
        """
        values = parse_tree("TOML", text, "The plan")
        if values.keys() == {"plan"} and isinstance(values["plan"], dict):
            values = values["plan"]
        return from_dict(cls, values, origin="the plan")

    @property
    def gpus(self) -> int:
        """Number of devices of the plan. Expert parallel groups are inside the data parallel ones."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def compiles_whole(self) -> bool:
        """Whether the whole model is compiled, with recorded passes or without."""
        return self.compile in ("whole", "graphs")

    @property
    def replicas(self) -> int:
        """Number of devices that each have weights for the same part of the model, including devices that split a
        sample's tokens."""
        return self.dp * self.cp

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step, over all devices."""
        return self.micro_batch * self.accumulate * self.dp


SWITCHES: dict[str, str] = {f.name: f.metadata["switch"] for f in fields(Plan) if "switch" in f.metadata}
"""Fields that a model's family applies, in the order of `build`, and the message about a model that cannot."""
TRAINING_ALONE: dict[str, str] = {
    f.name: f.metadata["training"] for f in fields(Plan) if "training" in f.metadata
}
"""Fields that inference refuses, and the message about each."""
TRAINED: dict[str, Any] = {f.name: f.metadata["trains"] for f in fields(Plan) if "trains" in f.metadata}
"""For each field of which training supports only one value, that value."""


def effect_of(name: str, *values: Any) -> Effect:
    """The effect on results if the Plan's field `name` changes from or to one of `values`."""
    metadata = Plan.__dataclass_fields__[name].metadata
    effects: list[Effect] = [metadata["effect"], *(metadata.get(str(value), "nothing") for value in values)]
    return max(effects, key=list(EFFECTS).index)
