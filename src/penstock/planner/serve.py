"""Memory and time of inference: weights, key–value cache, prefill and decoding, on one device or several."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.config import rules
from penstock.config.activations import ACTIVATIONS
from penstock.config.convert import Count, Natural, Positive, check_fields
from penstock.config.decoding import RECORDED, bucket
from penstock.config.formats import Products
from penstock.config.graph import Graph, Run
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig, stacks
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.planner.describe import totals, workload_of
from penstock.planner.operators import Part, counted_tokens
from penstock.planner.price import collective_seconds, seconds, send_seconds
from penstock.planner.rates import rates_of
from penstock.planner.terms import OpTerms, assumption, joined, storing

WORKSPACE_BYTES = 2**30
"""Bytes of a step's activations and of libraries' memory."""
PASS_LAUNCHES, BLOCK_LAUNCHES, TEXT_LAUNCHES = 80.0, 190.0, 5.0
"""Python's work per pass of our engine, per block and per text, in units of a CPU's smallest operator, without launches
of computing operators. Fitted to our engine on CPUs with GPTs of width 16, 2 and 8 blocks."""
HOST_OPERATOR_SECONDS = 1.66e-6
"""Seconds of the smallest operator on a GPU's host, absent from datasheets: `penstock probe` measured it on an EPYC."""
PASS_OPERATORS = 37
"""Operators that compute, and not only view, of a step of our engine for a GPU outside its blocks. Each takes a launch
(`Machine.launch_seconds`)."""
CACHE_PASSES = 3.0
"""Number of times that a step accesses keys and values: gathering them from the blocks of the paged cache reads and
writes, and attention reads."""
Steps = Literal["device", "launched", "recorded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How a model is served."""

    batch: Count = 1
    """Sequences that are generated together."""
    prompt: Count = 512
    """Prompt tokens of each sequence, processed at once before the first token is generated."""
    generated: Count = 128
    """Tokens of each sequence after its prompt."""
    tp: Count = 1
    """Tensor parallel degree: devices that share each block."""
    pp: Count = 1
    """Pipeline stages, which a token passes in turn."""
    ep: Count = 1
    """Expert parallel degree: number of parts into which the `tp` devices of a stage split a mixture's experts. Each
    expert is split over tp / ep devices: with ep=1 over all of them, with ep=tp it is whole on one."""
    uneven: Positive = 1.0
    """The largest load of a device over the mean, in visits to the experts that the devices hold; 1 or more."""
    spare: Natural = 0
    """Additional replicas of experts in each mixture, beyond one of each."""
    weight_bytes: Positive = 2.0
    """Bytes per weight: 2 in half precision, 1 in eight bits, 0.5 in four."""
    cache_bytes: Positive = 2.0
    """Bytes per element of the key–value cache."""
    half: bool = True
    """Whether the device computes in half precision where it can; else in fp32."""
    steps: Steps = "device"
    """How a GPU's work is launched. `device`: only the device's work is counted. `launched`: our server, whose
    operators Python launches one by one. `recorded`: our server with compile=whole, whose steps are replayed as a whole
    for all slots (`batch`), with Python choosing tokens between steps."""
    weights: Products = "packed"
    """How linear layers store their weights and multiply, as `weights=` of generation says; `packed` is what `auto`
    means on a CPU; a GPU multiplies plain weights. With `fp8`, layers inside blocks use it and everything else is in
    half precision, regardless of `weight_bytes`; the machine must support fp8."""

    @property
    def gpus(self) -> int:
        """Devices: expert parallelism splits experts over the tensor parallel ones."""
        return self.tp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePrediction:
    """Time and memory of one batch, on the fullest device."""

    serving: Serving
    prefill_seconds: float
    """Seconds until the first token."""
    decode_seconds_per_token: float
    """Seconds between two tokens of a sequence, at the mean length of the cache."""
    tokens_per_second: float
    """Generated tokens per second of all sequences together, prefill time included."""
    weights_bytes: int
    cache_bytes: int
    memory_bytes: int
    fits: bool
    largest_batch: int
    """Number of sequences whose cache fits in memory."""
    assumption: str = ""
    """A sentence that names the rate used in place of one that the machine does not have; "" if none is needed."""


def predict_inference(model: ModelConfig, machine: Machine, serving: Serving) -> InferencePrediction:
    """Predict generation with a decoder on `serving.gpus` devices of `machine`: seconds, and bytes of one device.

    Raises ConfigError, with every reason, for impossible sizes and for degrees that are illegal for the model.
    """
    problems = check_fields(serving, "serving") or [*_degrees(model, serving)]
    if not model.graph.generates or model.graph.remembered:
        problems.append(
            f"The model reads {model.graph.form}, but only decoders are predicted to generate text."
        )
    if problems:
        raise ConfigError(problems)
    passes = Passes(model, machine, serving)
    length = serving.prompt + serving.generated
    prefill = passes.prefill(serving.prompt, serving.batch)
    decode = passes.decode(serving.batch, serving.prompt + serving.generated // 2 - 1)
    weights = weights_bytes(model, serving)
    cache_per_token = cache_bytes_per_token(model, serving)
    cache = cache_per_token * serving.batch * length
    needed_bytes = int(weights + cache + WORKSPACE_BYTES)
    room = machine.memory_bytes - weights - WORKSPACE_BYTES
    total = prefill + serving.generated * decode
    return InferencePrediction(
        serving=serving, prefill_seconds=prefill, decode_seconds_per_token=decode,
        tokens_per_second=serving.batch * serving.generated / total, weights_bytes=int(weights), cache_bytes=int(cache),
        memory_bytes=needed_bytes, fits=not machine.memory_bytes or needed_bytes <= machine.memory_bytes,
        largest_batch=max(0, int(room / (cache_per_token * length))),
        assumption=assumption(machine, stored_on(machine, serving.weights)),
    )  # fmt: skip


def weights_bytes(model: ModelConfig, serving: Serving) -> float:
    """Bytes of the weights on one device."""
    every = totals(model)
    mixtures = [(part, part.block.stack.experts) for part in every.blocks if part.block and part.experts]
    spare = sum(part.count * part.experts * serving.spare / experts for part, experts in mixtures)
    if serving.weights != "fp8":
        return (every.parameters + spare) * serving.weight_bytes / serving.gpus
    inside = sum(part.count * part.learned for part in every.blocks)
    return (2.0 * (every.parameters - inside) + inside + spare) / serving.gpus


def cache_bytes_per_token(model: ModelConfig, serving: Serving) -> float:
    """Bytes of the key–value cache per token and sequence, on one device, over all runs that a text passes as it is
    continued, such as a body and its branch; for an encoder–decoder, its decoder's cache, for tokens of source and
    text. An encoder keeps none.

    With more devices than KV heads, several devices keep the same head; all devices keep the same latents.
    """
    if not model.graph.generates:
        return 0.0
    kept = sum(layer.kept_of_token(serving.tp) for run in model.graph.written for layer in run.stack.layers)
    return kept * serving.cache_bytes / serving.pp


def continued(graph: Graph) -> Sequence[Run]:
    """The runs that a token passes as a text is continued; for an encoder, its last run."""
    return graph.written or graph.runs[-1:]


def operators_of(graph: Graph) -> int:
    """Number of operators in a step of our engine for a GPU that compute and do not only return a view, as counted in
    the engine for each part of a block."""
    operators = PASS_OPERATORS
    for run in continued(graph):
        stack, layer = run.stack, run.stack.layers[0]
        both, rotated = layer.placement == "both", sum(each.rotary is not None for each in stack.layers)
        block = 16 + 24 * rotated / len(stack.layers) + 10 * bool(run.memories) + 2 * both
        block += 16 * bool(layer.latent) + 4 * layer.qk_norm + 5 * layer.qk_norm_whole
        block += 8 * (layer.score_cap is not None) + 6 * layer.sinks
        block += 5 * (ACTIVATIONS[stack.mlp].limit is not None)
        block += 6 * (layer.bias and layer.mixture is not None)
        norms = 2 * (1 + both + layer.qk_norm)
        operators += round(stack.depth * (block + 4 * norms * layer.norm.zero_centred))
        for mixture in (layer.mixture for layer in stack.layers if layer.mixture):
            operators += 28 + 6 * (mixture.shared_experts > 0)
            operators += 6 * (mixture.router == "sigmoid") + 8 * (mixture.router_groups > 1)
    return operators


def recorded_bytes(model: ModelConfig, serving: Serving, context: int) -> float:
    """Bytes per text (of at most `context` tokens) on one device of a server that records its steps: the cache and
    logits of each of the widest `RECORDED` buckets, and twice more the widest cache while a recording is made."""
    widths = sorted({bucket(tokens) for tokens in range(1, context + 1)})[-RECORDED:]
    logits = 4.0 * len(widths) * model.graph.words.vocabulary if model.graph.words else 0.0
    return cache_bytes_per_token(model, serving) * (sum(widths) + 2 * widths[-1]) + logits


def stored_on(machine: Machine, weights: Products) -> Products:
    """Weights as layers on a device of `machine` store them for inference: plain on GPUs, except fp8."""
    return weights if machine.device == "cpu" else "plain"


def _degrees(model: ModelConfig, serving: Serving) -> Iterator[str]:
    """Degrees that are illegal for this model."""
    tp, ep = serving.tp, serving.ep
    stack = stacks(model)[-1]
    yield from rules.inference_problems(Plan(tp=tp, pp=serving.pp), model, prefix="")
    if ep > 1 and not stack.experts:
        yield f"ep={ep} is for mixtures of experts, and the model is none; use ep=1."
    elif stack.experts % ep:
        yield f"ep={ep} cannot split the model's {stack.experts} experts evenly."
    if tp % ep:
        yield (
            f"ep={ep} splits the experts over the tp={tp} devices of a stage, so it must divide tp; use a tp that "
            "is a multiple of it, or ep=1."
        )


class Passes:
    """Seconds of the passes of a served model: of reading prompts, and of making one token of each sequence."""

    def __init__(self, model: ModelConfig, machine: Machine, serving: Serving) -> None:
        """Raises ConfigError for degrees that are illegal for the model."""
        if problems := [*_degrees(model, serving)]:
            raise ConfigError(problems)
        self.model: ModelConfig = model.writing()
        self.serving = serving
        self.fp8 = serving.weights == "fp8"
        self._plan = _plan(machine, half=serving.half, fp8=self.fp8)
        stored = stored_on(machine, serving.weights)
        self.storing = storing(machine, stored, heads=True)
        self.rates = rates_of(machine, self._plan, weights=stored)

    def prefill(self, tokens: int, samples: int = 1) -> float:
        """Seconds from prompts of `tokens` tokens to the first token of each; of an encoder, to its outputs."""
        work = workload_of(_sized(self.model, tokens), self._terms(samples))
        if not self.model.graph.generates:
            busy = sum(part.count * self._seconds(part) for part in work.parts)
            return busy if self.rates.cpu else self._with_host(busy, samples)
        # An encoder–decoder's decoder reads only its start token, and makes keys and values of the whole source.
        blocks = sum(part.count * self._seconds(part) for part in work.blocks)
        # Only the last token of a prompt needs an output.
        busy = blocks + self._ends(samples) + self._between(samples * tokens)
        return self._with_host(busy, samples)

    def decode(self, samples: int, cached: int) -> float:
        """One token of each of `samples` sequences, with `cached` tokens of each in the cache: through all stages in
        turn. An encoder–decoder's `cached` tokens include the source, here as long as the decoder's own text.
        """
        recorded, cpu = self.serving.steps == "recorded", self.rates.cpu
        rows = self.serving.batch if recorded and not cpu else samples
        sources = max(1, cached // 2) if self.model.graph.remembered else 1
        work = workload_of(_sized(self.model, sources), self._terms(rows, cached - sources + 1))
        blocks = [part for part in work.blocks if part.block and part.block.causal]
        token = sum(part.count * self._seconds(part, again=True) for part in blocks)
        busy = token + self._ends(rows) + self._between(rows)
        if recorded and not cpu:
            return busy + self._host(samples, blocks=False)
        if cpu or self.serving.steps == "launched":  # a GPU's attention has its own pass counted
            moved = samples * cached * cache_bytes_per_token(self.model, self.serving)
            busy += (CACHE_PASSES - (not cpu)) * moved / self.rates.memory
        return self._with_host(busy, samples)

    def parts(self) -> Iterator[tuple[int, Part]]:
        """The parts of all passes of a decoder's batch, each with its number of runs: first those of the prompts, then
        those of each generated token. Outside the blocks only last tokens are computed."""
        serving, samples = self.serving, self.serving.batch
        lengths = range(serving.prompt, serving.prompt + serving.generated - 1)
        works = [workload_of(_sized(self.model, serving.prompt), self._terms(samples))]
        works += [workload_of(_sized(self.model, 1), self._terms(samples, cached)) for cached in lengths]
        for work in works:
            yield from ((part.count, part) for part in work.blocks)
        ends = workload_of(_sized(self.model, 1), self._terms(samples))
        yield from ((serving.generated, part) for part in ends.parts if part.block is None)

    def _terms(self, samples: int, cached: int = 0) -> OpTerms:
        rates, serving = self.rates, self.serving
        terms = OpTerms(
            samples, serving.tp, ep=serving.ep, stream=rates.compute, product=rates.compute, fused=True, whole=True,
            host=rates.cpu, serving=True, cache=serving.cache_bytes, cached=max(0, cached), uneven=serving.uneven,
            products="fp8" if self.fp8 else "plain", weight=0.0 if self.fp8 else serving.weight_bytes,
        )  # fmt: skip
        return self.storing.terms(terms)

    def _ends(self, samples: int) -> float:
        """Seconds of one token of each sequence outside the blocks."""
        work = workload_of(_sized(self.model, 1), self._terms(samples))
        return sum(self._seconds(part) for part in work.parts if part.block is None)

    def _seconds(self, part: Part, *, again: bool = False) -> float:
        """Seconds of a part's forward operators; devices of one expert parallel group are tp / ep apart. `again` leaves
        out the other stack's keys and values, which the first token has left in the cache."""
        rates, serving, total = self.rates, self.serving, 0.0
        for op in joined(part, rates.machine, self._plan, self.storing.weights):
            if again and op.module == "cross" and op.pieces:
                continue
            if op.axis == "expert":
                total += collective_seconds(op, rates, serving.ep, serving.tp // serving.ep)
            elif op.axis:
                total += collective_seconds(op, rates, serving.tp, 1)
            elif op.module != "loss":
                total += seconds(op, rates)
                if rates.cpu:
                    total += op.launches * rates.machine.launch_seconds
        return total

    def _with_host(self, busy: float, samples: int) -> float:
        """Seconds of a pass, from the device's busy seconds and the operators that Python launches: ahead of a GPU, but
        alternating with a CPU's work."""
        if self.rates.cpu:
            return busy + self._host(samples)
        return busy if self.serving.steps == "device" else max(busy, self._host(samples))

    def _host(self, samples: int, *, blocks: bool = True) -> float:
        """Seconds of Python's work for a pass, inside and outside blocks, and of a GPU's launches."""
        graph, machine = self.model.graph, self.rates.machine
        depth = sum(run.stack.depth for run in continued(graph)) if blocks else 0
        launches = PASS_LAUNCHES + depth * BLOCK_LAUNCHES + samples * TEXT_LAUNCHES
        if self.rates.cpu:
            return launches * machine.launch_seconds
        operators = operators_of(graph) if blocks else PASS_OPERATORS
        return launches * HOST_OPERATOR_SECONDS + operators * machine.launch_seconds

    def _between(self, rows: int) -> float:
        """Seconds of the transfers from stage to stage."""
        serving = self.serving
        moved = rows * stacks(self.model)[-1].width * self.rates.compute / serving.tp
        return (serving.pp - 1) * send_seconds(self.rates, serving.tp, moved)


def _plan(machine: Machine, *, half: bool, fp8: bool) -> Plan:
    """A Plan with the dtypes that inference uses on a machine. Raises ConfigError where the machine has no fp8."""
    for dtype in ("bf16", "fp16") if half and not fp8 else ():
        if dtype in machine.peak_flops:
            return Plan(precision="O3", dtype=dtype, attention="flash")
    plan = Plan(precision="O2", dtype="bf16", products="fp8", attention="flash") if fp8 else Plan()
    rules.require(plan, machine=machine)
    return plan


def _sized(model: ModelConfig, tokens: int) -> ModelConfig:
    """The model with samples of `tokens` tokens; a decoder's own text beside a memory has one."""
    graph = model.graph
    decoder_input = graph.text.name if graph.remembered and graph.text is not None else ""
    lengths = (1 if source.name == decoder_input else tokens for source in graph.inputs)
    sized: ModelConfig = model.with_lengths(*lengths)
    return sized


BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LENGTHS = (1, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of an engine's steps, interpolated between a few sizes: predicted, or measured on the engine itself."""

    prefills: tuple[tuple[float, float], ...]
    """Tokens of a prompt, and seconds; in order, and at least two."""
    decodes: tuple[tuple[float, float, float], ...]
    """Sequences, seconds of a step with an empty cache, and seconds for each cached token of a sequence; in order."""
    request: float = 0.0
    """Seconds of a request's way to the engine and back, during which the engine works on other requests."""

    def prefill(self, tokens: float) -> float:
        """Seconds of reading one prompt."""
        return _linear(self.prefills, tokens)

    def decode(self, batch: int, cached: float) -> float:
        """Seconds of one token for each of `batch` sequences that attend to `cached` tokens."""
        empty = [(size, seconds) for size, seconds, _ in self.decodes]
        each = [(size, seconds) for size, _, seconds in self.decodes]
        return _linear(empty, batch) + max(0.0, _linear(each, batch)) * cached


def _linear(points: Sequence[tuple[float, float]], where: float) -> float:
    """Linear interpolation between the points, and extrapolation beyond the last ones."""
    if len(points) == 1:
        return points[0][1]
    right = min(max(1, bisect_left(points, (where,))), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return max(min(y0, y1) if where < x0 else 0.0, y0 + (where - x0) * (y1 - y0) / (x1 - x0))


def predicted_costs(
    model: ModelConfig, machine: Machine, serving: Serving, *, slots: int, longest: int
) -> StepCosts:
    """The steps of `model` on `serving.gpus` devices, with up to `slots` sequences of up to `longest` tokens."""
    passes = Passes(model, machine, replace(serving, batch=slots))
    sizes = [size for size in LENGTHS if size < longest] + [max(2, longest)]
    if model.graph.vision:
        sizes = [1, max(2, counted_tokens(model))]
    decodes = []
    for batch in [size for size in BATCHES if size < slots] + [slots] if model.graph.generates else ():
        short, long = passes.decode(batch, 1), passes.decode(batch, max(2, longest))
        decodes.append((float(batch), short, (long - short) / max(1, longest - 1)))
    return StepCosts(tuple((float(size), passes.prefill(size)) for size in sizes), tuple(decodes))
