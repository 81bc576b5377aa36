"""How a model runs: the central datum. It prints and parses as one line, and is stored with every run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from penstock.config.convert import BadValue, check_fields, convert, field_types, nearest
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.errors import ConfigError

Precision = Literal["O0", "O1", "O3"]
HalfDtype = Literal["bf16", "fp16"]
Matmul = Literal["highest", "high", "medium"]
OptimizerForm = Literal["loop", "foreach", "fused", "contiguous"]
Layout = Literal["batch_first", "batch_second"]
AttentionBackend = Literal["auto", "plain", "sdpa", "flash", "efficient", "cudnn", "math"]
Compile = Literal["none", "blocks", "whole"]

BASELINE = "baseline"
"""How a Plan of defaults prints."""

# SDPA backends that exist per device, and those that compute in half precision only (torch/nn/attention).
_CPU_ATTENTION = ("auto", "plain", "sdpa", "flash", "math")
_HALF_ONLY = ("flash", "cudnn")
_FLASH_HEAD_WIDTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model runs on a machine. The defaults are the plain baseline that every optimisation is measured from."""

    precision: Precision = "O0"
    """O0: fp32 throughout. O1: autocast, fp32 weights. O3: weights, activations and gradients in `dtype`."""
    dtype: HalfDtype = "bf16"
    """The half-width type that O1 and O3 compute in."""
    matmul: Matmul = "highest"
    """Precision of fp32 matrix products, in torch's words: `high` is TF32 on a GPU, `medium` bf16 passes on a CPU."""
    optimizer: OptimizerForm = "loop"
    """One launch per tensor, per chunk of tensors, per group (fused), or one flat buffer per group and dtype."""
    layout: Layout = "batch_first"
    """Order of the token tensor inside the blocks: (batch, sequence, width) or (sequence, batch, width)."""
    attention: AttentionBackend = "sdpa"
    """`sdpa` is torch's own choice; `plain` the two matrix products; the others pin one backend of SDPA;
    `auto` is Penstock's choice by device, dtype and sequence length."""
    compile: Compile = "none"
    """torch.compile: of each repeated block (`blocks`, one compilation serves all), or of the whole model."""
    micro_batch: int = 8
    """Samples per forward pass on one device."""
    accumulate: int = 1
    """Forward and backward passes per optimizer step."""

    def __post_init__(self) -> None:
        problems = check_fields(self, "plan")
        if not problems:
            problems = [
                f"plan.{name} is {getattr(self, name)}, but must be at least 1."
                for name in ("micro_batch", "accumulate")
                if getattr(self, name) < 1
            ]
        if problems:
            raise ConfigError(problems)

    @classmethod
    def parse(cls, line: str) -> Plan:
        """The Plan that a line such as `precision=O1 optimizer=fused` writes; what is absent keeps its default.

        Words are separated by white space, in any order; `baseline` and an empty line are the defaults. Raises
        `ConfigError` with every problem of the line.
        """
        kinds = field_types(cls)
        values: dict[str, Any] = {}
        problems = []
        for word in line.split():
            if word == BASELINE:
                continue
            name, equals, text = word.partition("=")
            if not equals:
                problems.append(
                    f"The plan's word {word!r} is no setting; write key=value, or {BASELINE} for the defaults."
                )
            elif name not in kinds:
                problems.append(
                    f"plan.{name} is not a setting.{nearest(name, kinds)} A plan takes {', '.join(kinds)}."
                )
            elif name in values:
                problems.append(f"plan.{name} is given twice; keep one.")
            else:
                try:
                    values[name] = convert(text, kinds[name], text=True)
                except BadValue as bad:
                    problems.append(f"plan.{name} is {text!r}, but {bad}")
        if problems:
            raise ConfigError(problems)
        return cls(**values)

    def line(self) -> str:
        """The Plan as one line of key=value words: what differs from the defaults, or `baseline`.

        `Plan.parse` gives an equal Plan back.
        """
        words = [
            f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default
        ]
        return " ".join(words) or BASELINE

    def __str__(self) -> str:
        return self.line()

    def to_toml(self) -> str:
        """Every field as TOML; `from_toml` gives an equal Plan back."""
        from penstock.config.load import dump_toml

        return dump_toml(self)

    @classmethod
    def from_toml(cls, text: str) -> Plan:
        """The Plan that TOML text writes; what is absent keeps its default. Raises `ConfigError`."""
        import tomllib

        from penstock.config.load import from_dict

        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"The plan is no valid TOML: {error}.") from error
        return from_dict(cls, values, origin="the plan")

    def validate(self, model: ModelConfig, machine: Machine) -> None:
        """Raise `ConfigError`, listing every reason why this Plan cannot train `model` on `machine`."""
        problems = [*self._precision_problems(machine), *self._attention_problems(model, machine)]
        if problems:
            raise ConfigError(problems)

    def _precision_problems(self, machine: Machine) -> Iterator[str]:
        if self.precision == "O0":
            if self.dtype != Plan().dtype:
                yield (
                    f"plan.dtype={self.dtype} has no effect with plan.precision=O0, which computes in fp32; "
                    "choose precision=O1 or O3, or leave dtype out."
                )
        elif self.dtype not in machine.peak_flops:
            able = [dtype for dtype in ("bf16", "fp16") if dtype in machine.peak_flops]
            remedy = f"use dtype={able[0]}" if able else "use precision=O0"
            yield f"plan.dtype={self.dtype} cannot be computed on machine {machine.name}; {remedy}."
        elif self.dtype == "fp16" and self.optimizer not in ("fused", "contiguous"):
            yield (
                f"plan.dtype=fp16 needs a loss scale, and plan.optimizer={self.optimizer} cannot skip an overflowed "
                "step without stopping the device to ask; use optimizer=fused or contiguous, or dtype=bf16."
            )
        if self.matmul != "highest" and machine.device == "cuda" and "tf32" not in machine.peak_flops:
            yield (
                f"plan.matmul={self.matmul} asks for TF32, which machine {machine.name} does not have; "
                "use matmul=highest."
            )

    def _attention_problems(self, model: ModelConfig, machine: Machine) -> Iterator[str]:
        if machine.device == "cpu" and self.attention not in _CPU_ATTENTION:
            yield (
                f"plan.attention={self.attention} exists on GPUs only, and machine {machine.name} is a CPU; "
                f"use one of {', '.join(_CPU_ATTENTION)}."
            )
        if machine.device == "cuda" and self.attention in _HALF_ONLY:
            if self.precision == "O0":
                yield (
                    f"plan.attention={self.attention} computes in half precision only, but plan.precision=O0 is "
                    "fp32; use precision=O1 or O3, or attention=efficient."
                )
            if "bf16" not in machine.peak_flops:
                yield (
                    f"plan.attention={self.attention} needs a GPU of compute capability 8.0, which machine "
                    f"{machine.name} is not; use attention=efficient or math."
                )
        if self.attention == "flash" and model.head_width > _FLASH_HEAD_WIDTH:
            yield (
                f"plan.attention=flash takes heads of at most {_FLASH_HEAD_WIDTH} features, but this model's have "
                f"{model.head_width}; raise model.heads, or use attention=math."
            )
