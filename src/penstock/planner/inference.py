"""Memory and time of generating text: weights, key–value cache, prefill and decoding, on one device or several."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.config.convert import check_fields
from penstock.config.machine import Machine
from penstock.config.model import DecoderConfig, ModelConfig
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.planner.attention import fused_seconds, keys_computed
from penstock.planner.collectives import exchange_seconds, group_of, reduce_seconds, send_seconds
from penstock.planner.constants import DEFAULT, Constants
from penstock.planner.gemm import gemm_seconds
from penstock.planner.rates import Rates, rates_of
from penstock.planner.shapes import Block, Shape, shape_of

WORKSPACE_BYTES = 2**30
"""Activations of a step and what libraries keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How a model is served."""

    batch: int = 1
    """Sequences that are generated together."""
    prompt: int = 512
    """Tokens of each sequence, read at once before the first is generated."""
    generated: int = 128
    """Tokens of each sequence after its prompt."""
    tp: int = 1
    """Tensor parallel degree: devices that share each block."""
    pp: int = 1
    """Pipeline stages, which a token goes through one after the other."""
    ep: int = 1
    """Expert parallel degree: into how many parts the `tp` devices of a stage share out a mixture's experts. Each
    expert is then split over tp / ep of them and not over all: with ep=1 over all, with ep=tp it lies on one whole."""
    weight_bytes: float = 2.0
    """Per weight: 2 in half precision, 1 in eight bits, 0.5 in four."""
    cache_bytes: float = 2.0
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


def predict_inference(
    model: ModelConfig, machine: Machine, serving: Serving, constants: Constants = DEFAULT
) -> InferencePrediction:
    """Predict generation with a decoder on `serving.gpus` devices of `machine`: seconds, and bytes of one device.

    Raises ConfigError, with every reason, for sizes that cannot be and degrees that the model does not admit.
    """
    shape = shape_of(model)
    _check(model, shape, serving)
    dtype = "bf16" if "bf16" in machine.peak_flops else "fp16" if "fp16" in machine.peak_flops else None
    plan = (
        Plan(precision="O3", dtype="fp16" if dtype == "fp16" else "bf16", attention="flash")
        if dtype
        else Plan()
    )
    rates = rates_of(machine, plan, constants)
    weights = _weights(shape, serving)
    each = cache_bytes_per_token(shape, serving)
    cache = each * serving.batch * (serving.prompt + serving.generated)
    prefill = _pass_seconds(shape, rates, serving, serving.prompt, serving.prompt)
    seen = serving.prompt + serving.generated // 2
    decode = _pass_seconds(shape, rates, serving, 1, seen)
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


def cache_bytes_per_token(shape: Shape, serving: Serving) -> float:
    """Bytes of the key–value cache of one token of one sequence, on one device."""
    total = 0.0
    for block in shape.blocks:
        heads = max(1.0, block.kv_heads / serving.tp)
        total += block.count * 2 * heads * block.features * serving.cache_bytes
    return total / serving.pp


def _check(model: ModelConfig, shape: Shape, serving: Serving) -> None:
    problems = check_fields(serving, "serving") or [*_sizes(serving)] or [*_degrees(model, shape, serving)]
    if problems:
        raise ConfigError(problems)


def _sizes(serving: Serving) -> Iterator[str]:
    """Numbers that no model could be served with."""
    for name in ("batch", "prompt", "generated", "tp", "pp", "ep"):
        value = getattr(serving, name)
        if value < 1:
            yield f"serving.{name} is {value}, but must be at least 1."
    for name in ("weight_bytes", "cache_bytes"):
        value = getattr(serving, name)
        if not 0 < value < math.inf:
            yield f"serving.{name} is {value}, but must be above 0 and finite; half precision takes 2."


def _degrees(model: ModelConfig, shape: Shape, serving: Serving) -> Iterator[str]:
    """Degrees that this model does not admit."""
    tp, ep = serving.tp, serving.ep
    if not isinstance(model, DecoderConfig):
        yield f"model.family is {model.family}, but only decoders are predicted to generate text."
        return
    if any(block.heads % tp for block in shape.blocks):
        yield f"tp={tp} cannot share out the model's {model.heads} attention heads evenly."
    if serving.pp > shape.depth:
        yield f"pp={serving.pp} leaves stages without a block, for the model has {shape.depth}."
    if ep > 1 and not model.experts:
        yield f"ep={ep} is for mixtures of experts, and the model is none; use ep=1."
    elif model.experts % ep:
        yield f"ep={ep} cannot share out the model's {model.experts} experts evenly."
    if tp % ep:
        yield (
            f"ep={ep} shares the experts out over the tp={tp} devices of a stage, so it must divide tp; use a tp that "
            "is a multiple of it, or ep=1."
        )


def _weights(shape: Shape, serving: Serving) -> float:
    return shape.parameters * serving.weight_bytes / (serving.tp * serving.pp)


def _pass_seconds(shape: Shape, rates: Rates, serving: Serving, tokens: int, seen: int) -> float:
    """One forward pass of all stages, one after the other: `tokens` new ones of each sequence, which see `seen`.

    With expert parallelism each device sends its share of the rows to the devices of the experts that they visit, and
    gets results back: two all-to-alls per mixture. Groups that hold alike experts' parts are tp / ep devices apart.
    """
    rows = serving.batch * tokens
    group = group_of(rates, serving.tp, 1)
    moved = float(rows) * shape.width * rates.compute
    seconds = 0.0
    for block in shape.blocks:
        one = _block_seconds(block, rates, serving, rows, tokens, seen)
        one += 2 * reduce_seconds(group, moved)
        if block.experts and serving.ep > 1:
            experts = group_of(rates, serving.ep, serving.tp // serving.ep)
            one += 2 * exchange_seconds(experts, moved * block.routed / serving.tp)
        seconds += block.count * one
    columns = -(-shape.output // serving.tp)
    seconds += _product(rates, serving, serving.batch, columns, shape.width)
    return seconds + (serving.pp - 1) * send_seconds(rates, serving.tp, moved / serving.tp)


def _product(rates: Rates, serving: Serving, m: int, n: int, k: int, batch: int = 1) -> float:
    """A product whose weights may be stored in fewer bytes than they are multiplied in."""
    computed = gemm_seconds(rates, m, n, k, batch)
    read = batch * n * k * serving.weight_bytes / rates.memory
    stored = batch * n * k * rates.linear / rates.memory
    # Where reading the weights is what takes the time, reading fewer bytes takes less.
    return max(read, computed - stored + read) if computed < 1.5 * stored else computed


def _block_seconds(block: Block, rates: Rates, serving: Serving, rows: int, tokens: int, seen: int) -> float:
    t, d = serving.tp, block.width
    # Where there are more devices than heads of keys, several devices keep the same head.
    a, kv = block.heads * block.features // t, -(-block.kv_heads // t) * block.features
    seconds = _product(rates, serving, rows, a + 2 * kv, d) + _product(rates, serving, rows, d, a)
    hidden = -(-block.hidden // t)
    up = hidden * (2 if block.gated else 1)
    if block.experts:
        met = min(block.experts, rows * block.routed)
        each = -(-rows * block.routed // met)
        # Of one device: 1/ep of the experts that are met, and of each of them ep/t of its width.
        held = -(-met // serving.ep)
        part = -(-block.hidden * serving.ep // t)
        wide = part * (2 if block.gated else 1)
        seconds += _product(rates, serving, each, wide, d, held) + _product(
            rates, serving, each, d, part, held
        )
        if block.shared:
            seconds += _product(rates, serving, rows, up * block.shared, d)
            seconds += _product(rates, serving, rows, d, hidden * block.shared)
    else:
        seconds += _product(rates, serving, rows, up, d) + _product(rates, serving, rows, d, hidden)
    if tokens == 1:
        cached = 2.0 * serving.batch * seen * kv * serving.cache_bytes
        seconds += max(4.0 * rows * seen * a / rates.attention, cached / rates.memory)
    else:
        scores = rows * keys_computed(tokens, seen, causal=True) * a / block.features
        seconds += fused_seconds(
            rates, scores, block.features, float(rows) * a * rates.compute, backward=False
        )
    seconds += rates.kernel_seconds
    passes = rows * (12 * d + 3 * hidden) * rates.compute
    return seconds + passes / rates.memory + 6 * rates.kernel_seconds
