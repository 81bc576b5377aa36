"""Memory and time of generating text: weights, key–value cache, prefill and decoding, on one device or several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.config import rules
from penstock.config.convert import Count, Positive, check_fields
from penstock.config.machine import Machine
from penstock.config.model import DecoderConfig, ModelConfig
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.planner.collectives import send_seconds
from penstock.planner.describe import described, totals
from penstock.planner.listing import Terms
from penstock.planner.operators import Part
from penstock.planner.price import collective_seconds, seconds
from penstock.planner.rates import Rates, rates_of

WORKSPACE_BYTES = 2**30
"""Activations of a step and what libraries keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How a model is served."""

    batch: Count = 1
    """Sequences that are generated together."""
    prompt: Count = 512
    """Tokens of each sequence, read at once before the first is generated."""
    generated: Count = 128
    """Tokens of each sequence after its prompt."""
    tp: Count = 1
    """Tensor parallel degree: devices that share each block."""
    pp: Count = 1
    """Pipeline stages, which a token goes through one after the other."""
    ep: Count = 1
    """Expert parallel degree: into how many parts the `tp` devices of a stage share out a mixture's experts. Each
    expert is then split over tp / ep of them and not over all: with ep=1 over all, with ep=tp it lies on one whole."""
    weight_bytes: Positive = 2.0
    """Per weight: 2 in half precision, 1 in eight bits, 0.5 in four."""
    cache_bytes: Positive = 2.0
    """Per number of the key–value cache."""

    @property
    def gpus(self) -> int:
        """Devices: expert parallelism splits experts over the tensor parallel ones."""
        return self.tp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePrediction:
    """Time and memory of one batch, on the fullest device."""

    serving: Serving
    prefill_seconds: float
    """Until the first token."""
    decode_seconds_per_token: float
    """Between two tokens of a sequence, at the mean length of the cache."""
    tokens_per_second: float
    """Generated, of all sequences together, prefill included."""
    weights_bytes: int
    cache_bytes: int
    memory_bytes: int
    fits: bool
    largest_batch: int
    """Sequences whose cache the memory holds."""


def predict_inference(model: ModelConfig, machine: Machine, serving: Serving) -> InferencePrediction:
    """Predict generation with a decoder on `serving.gpus` devices of `machine`: seconds, and bytes of one device.

    Raises ConfigError, with every reason, for sizes that cannot be and degrees that the model does not admit.
    """
    problems = check_fields(serving, "serving") or [*_degrees(model, serving)]
    if problems:
        raise ConfigError(problems)
    assert isinstance(model, DecoderConfig)
    plan = Plan()
    for dtype in ("fp16", "bf16"):
        if dtype in machine.peak_flops:
            plan = Plan(precision="O3", dtype=dtype, attention="flash")
    if plan.precision == "O0":
        rules.require(plan, machine=machine)
    rates = rates_of(machine, plan)
    weights = totals(model).parameters * serving.weight_bytes / serving.gpus
    each = cache_bytes_per_token(model, serving)
    cache = each * serving.batch * (serving.prompt + serving.generated)
    prefill, decode = _passes(model, rates, serving)
    needed = int(weights + cache + WORKSPACE_BYTES)
    room = machine.memory_bytes - weights - WORKSPACE_BYTES
    total = prefill + serving.generated * decode
    return InferencePrediction(
        serving=serving,
        prefill_seconds=prefill,
        decode_seconds_per_token=decode,
        tokens_per_second=serving.batch * serving.generated / total,
        weights_bytes=int(weights),
        cache_bytes=int(cache),
        memory_bytes=needed,
        fits=not machine.memory_bytes or needed <= machine.memory_bytes,
        largest_batch=max(0, int(room / (each * (serving.prompt + serving.generated)))),
    )


def cache_bytes_per_token(model: DecoderConfig, serving: Serving) -> float:
    """Bytes of the key–value cache of one token of one sequence, on one device.

    Where there are more devices than heads of keys, several devices keep the same head.
    """
    heads = max(1.0, model.kv / serving.tp)
    return model.depth * 2 * heads * model.head_width * serving.cache_bytes / serving.pp


def _degrees(model: ModelConfig, serving: Serving) -> Iterator[str]:
    """Degrees that this model does not admit."""
    tp, ep = serving.tp, serving.ep
    if not isinstance(model, DecoderConfig):
        yield f"model.family is {model.family}, but only decoders are predicted to generate text."
        return
    if model.heads % tp:
        yield f"tp={tp} cannot share out the model's {model.heads} attention heads evenly."
    if serving.pp > model.depth:
        yield f"pp={serving.pp} leaves stages without a block, for the model has {model.depth}."
    if ep > 1 and not model.experts:
        yield f"ep={ep} is for mixtures of experts, and the model is none; use ep=1."
    elif model.experts % ep:
        yield f"ep={ep} cannot share out the model's {model.experts} experts evenly."
    if tp % ep:
        yield (
            f"ep={ep} shares the experts out over the tp={tp} devices of a stage, so it must divide tp; use a tp that "
            "is a multiple of it, or ep=1."
        )


def _passes(model: DecoderConfig, rates: Rates, serving: Serving) -> tuple[float, float]:
    """Seconds of reading the prompts, and of the pass that makes one token of each sequence at the mean length of the
    cache: of all stages, one after the other."""
    terms = Terms(
        serving.batch, serving.tp, ep=serving.ep, stream=rates.compute, product=rates.compute, fused=True, whole=True,
        serving=True, weight=serving.weight_bytes, cache=serving.cache_bytes,
    )  # fmt: skip
    prompt = described(replace(model, sequence=serving.prompt), terms)
    cached = serving.prompt + serving.generated // 2 - 1
    token = described(replace(model, sequence=1), terms._replace(cached=cached))
    blocks, first = (
        sum(part.count * _seconds(part, rates, serving) for part in work.blocks) for work in (prompt, token)
    )
    # Only the last token of a prompt needs an output.
    ends = sum(_seconds(part, rates, serving) for part in token.parts if part.block is None)

    def between(tokens: int) -> float:
        moved = serving.batch * tokens * model.width * rates.compute / serving.tp
        return (serving.pp - 1) * send_seconds(rates, serving.tp, moved)

    return blocks + ends + between(serving.prompt), first + ends + between(1)


def _seconds(part: Part, rates: Rates, serving: Serving) -> float:
    """Seconds of a part's forward operators; groups that hold alike experts' parts are tp / ep devices apart."""
    total = 0.0
    for op in part.forward:
        if op.axis == "expert":
            total += collective_seconds(op, rates, serving.ep, serving.tp // serving.ep)
        elif op.axis:
            total += collective_seconds(op, rates, serving.tp, 1)
        elif not op.name.startswith("loss"):
            total += seconds(op, rates)
    return total
