"""What the planner says of a Plan: time, memory and utilisation of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.config.plan import Plan

MARGIN = 0.93
"""Share of a device's memory that a layout may take: the rest is the context, libraries and the allocator's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Time and memory of one optimizer step. Seconds and bytes are those of the slowest and the fullest device."""

    plan: Plan
    machine: str
    iteration_seconds: float
    """One optimizer step: `plan.accumulate` micro-batches and one update."""
    samples_per_second: float
    """Over all devices."""
    memory_bytes: int
    """Peak, without what the allocator and libraries add on one device; with a margin for it on several."""
    fits: bool
    """Whether that leaves the context, libraries and the allocator their share of the machine's memory: `MARGIN`."""
    model_flops_per_second_per_gpu: float
    """Forward and backward of the model, attention in full; what is computed twice is not counted."""
    mfu: float
    """Model FLOP/s as a share of `peak_flops`."""
    hfu: float
    """The same with what is computed twice."""
    peak_flops: float
    """The machine's peak in the type that the plan computes its linear layers in."""
    peak_name: str
    seconds: dict[str, float]
    """`iteration_seconds` by part."""
    memory: dict[str, int]
    """`memory_bytes` by part."""
    activations: dict[str, int] = field(default_factory=dict)
    """`memory["activations"]` by kind."""
    micro_batches_held: float = 1.0
    """Micro-batches whose activations the pipeline's first stage holds at its high-water mark; 1 without a pipeline."""
    gpus: int = 1
    global_batch: int = 0
    """Samples of one optimizer step, over all devices."""
    tokens_per_sample: int = 0
    parameters: int = 0
    bubble_fraction: float = 0.0
    """Idle seconds of the pipeline over its busy seconds: (p-1)/(v m) for equal stages, less under zero_bubble."""
    forward_seconds: float = 0.0
    """Of the slowest stage, for one micro-batch."""
    backward_seconds: float = 0.0
    """The same with what is computed again."""
    weight_gradient_seconds: float = 0.0
    """Of `backward_seconds`, the gradients of weights, which a zero-bubble schedule puts off."""
    memory_limit_bytes: int = 0
    """The machine's memory; 0 where it is unknown."""

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens over all devices, per device."""
        return self.samples_per_second * self.tokens_per_sample / self.gpus

    def days(self, samples: float) -> float:
        """Days to see so many samples."""
        return samples / self.samples_per_second / 86400

    def gpu_hours(self, samples: float) -> float:
        """Device hours to see so many samples."""
        return samples / self.samples_per_second / 3600 * self.gpus
