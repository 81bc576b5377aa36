"""Find the layout that serves given traffic in time on the fewest devices: dtypes, degrees, replicas, slots and cache;
and the command of the server that runs it.

Each candidate that fits the memory is simulated over the whole traffic; see `penstock.serve.traffic`. Layouts are tried
from one replica up, until one is fast enough, because more replicas only cost more. A pipeline is tried only if tensor
parallelism within a node does not make the model fit, because it makes no request faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.config.formats import BYTES, HALVES, LOSSY, Dtype, WeightType
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig, stacks
from penstock.config.plan import Plan
from penstock.config.rules import inference_problems
from penstock.errors import ConfigError
from penstock.planner.loads import LoadRecord, read_loads
from penstock.planner.serve import (
    WORKSPACE_BYTES,
    Serving,
    StepCosts,
    Steps,
    cache_bytes_per_token,
    predicted_costs,
    recorded_bytes,
    stored_on,
    weights_bytes,
)
from penstock.planner.terms import assumption
from penstock.serve.balance import slots_by, spare_for, unevenness_of
from penstock.serve.scheduler import Limits
from penstock.serve.settings import DeployConfig
from penstock.serve.traffic import Arrival, Served, simulate

SLOTS = (256, 64, 16, 4)
"""Numbers of concurrent sequences to try. With fewer, each sequence gets its tokens faster."""
PATIENCE = 10.0
"""Without a limit, 95 % of requests may take this many times as long as a request on an idle server."""
SERVED: tuple[Dtype, ...] = ("fp32", "bf16", "fp16", "fp8")
"""Dtypes of weights that `penstock serve` supports; with `fp8`, everything outside the blocks is bf16."""
ENDLESS = 1 << 20
"""Queue length of a simulation, practically unlimited, so that waiting shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to serve, and its predicted speed and memory."""

    type: Dtype
    tp: int
    pp: int
    replicas: int
    slots: int
    memory_bytes: float
    """Bytes on one device: weights, the cache that its slots may need, and workspace."""
    cache_tokens: int
    """Capacity of one replica's cache, in tokens."""
    context: int
    """Tokens of the longest sequence."""
    served: Served | None = None
    """None if the model does not fit."""
    costs: StepCosts | None = None
    steps: Steps = "device"
    """The kind of steps that is predicted; `recorded` needs compile=whole and cache=slots."""
    spare: int = 0
    """Replicas of experts in each mixture, in addition to one copy of each."""
    uneven: float = 1.0
    """The ratio of a device's largest load to the mean, in visits to experts."""
    why: str = ""
    """Why the layout is not the choice; empty for the choice itself."""
    assumption: str = ""
    """A sentence on the rates that replace rates missing from the machine; empty if none is missing."""

    @property
    def gpus(self) -> int:
        """Total number of devices."""
        return self.tp * self.pp * self.replicas

    @property
    def device_hours(self) -> float:
        """Device hours per million generated tokens, at the given traffic."""
        rate = self.served.tokens_per_second if self.served else 0.0
        return self.gpus * 1e6 / rate / 3600 if rate else 0.0

    def words(self) -> str:
        """The layout's name in a sentence."""
        split = " ".join(f"{name}={value}" for name, value in (("tp", self.tp), ("pp", self.pp)) if value > 1)
        copies = f"{self.replicas} replicas" if self.replicas > 1 else "one replica"
        spare = f", {self.spare} spare experts" if self.spare else ""
        return f"{self.type} on {copies}{f' of {split}' if split else ''}{spare}, {self.slots} slots"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The choice, None if no layout is fast enough, and all layouts that were tried, the choice first."""

    choice: Layout | None
    layouts: tuple[Layout, ...]


def types_of(wanted: Sequence[WeightType], machine: Machine) -> list[Dtype]:
    """The dtypes of weights to choose from on a machine. Raises ConfigError for a dtype that it does not support."""
    types: list[Dtype] = []
    for name in wanted:
        if name == "auto":
            half: Dtype = next((kind for kind in HALVES if kind in machine.peak_flops), "fp32")
            types.append("fp32" if machine.device == "cpu" else half)
        elif name in (*HALVES, "fp8") and name not in machine.peak_flops:
            have = ", ".join(machine.peak_flops)
            raise ConfigError(f"types names {name}, but {machine.name} computes in {have} only.")
        else:
            types.append(name)
    return list(dict.fromkeys(types))


def explore(
    model: ModelConfig, machine: Machine, arrivals: Sequence[Arrival], config: DeployConfig
) -> Ranking:
    """Try layouts of `model` on `machine` for some traffic.

    Raises ConfigError if prompts and answers are longer than the model's positions, or the model cannot be served.
    """
    context = max(arrival.prompt + arrival.answer for arrival in arrivals)
    if model.graph.vision:
        raise ConfigError("A vision model reads images, not tokens; penstock deploy is for text models.")
    if not model.graph.generates:
        arrivals = [arrival._replace(answer=1) for arrival in arrivals]
    learned = [run.rows for run in model.graph.runs if run.stack.positions == "learned"]
    most = min(learned, default=context)
    if context > most:
        raise ConfigError(
            f"The longest request has {context:,} tokens, but the model has {most:,} positions."
        )
    chosen = types_of(config.types, machine)
    offered = [kind for kind in LOSSY if kind not in chosen and model.graph.generates]
    offered = [kind for kind in offered if kind != "fp8" or kind in machine.peak_flops]
    experts = experts_of(model)
    if config.loads is not None and not experts:
        raise ConfigError("loads is for mixtures of experts, but the model has none; leave loads out.")
    record = None if config.loads is None else read_loads(Path(config.loads))
    tried: list[Layout] = []
    hostings: dict[int, list[dict[str, Any]]] = {}
    for kind in (*chosen, *offered):
        for tp, pp in _degrees(model, machine, max(config.devices), kind):
            serving = _serving(model, machine, kind, tp, pp)
            if tp not in hostings:
                hostings[tp] = _hostings(model, record, serving.ep)
            for hosting in hostings[tp]:
                forms = []
                for steps in _steps(model, machine, config, kind, serving):
                    placed = replace(serving, steps=steps, **hosting)
                    forms.append([*_replicas(model, machine, arrivals, config, kind, placed, context)])
                tried += min(forms, key=lambda layouts: min(map(_rank, layouts), default=(True, 0, 0.0)))
    return _judged(tried, chosen, config)


def experts_of(model: ModelConfig) -> list[int]:
    """The number of experts of each mixture, in the order of the model."""
    return [run.stack.experts for run in model.graph.runs for layer in run.stack.layers if layer.mixture]


def _hostings(model: ModelConfig, record: LoadRecord | None, ep: int) -> list[dict[str, Any]]:
    """Fields of `Serving` for each placement of a record's experts on `ep` devices: with one copy of each, and with
    replicas to even out loads."""
    if record is None:
        return [{}]
    hostings = []
    for spare in sorted({0, spare_for(record, ep) if ep > 1 else 0}):
        slots = slots_by(record, experts_of(model), ep, spare)
        hostings.append({"spare": spare, "uneven": unevenness_of(record, slots)})
    return hostings


def _degrees(model: ModelConfig, machine: Machine, gpus: int, kind: Dtype) -> Iterator[tuple[int, int]]:
    """Tensor and pipeline degrees: pipelines only if no tensor degree makes the weights fit."""
    stack = stacks(model)[-1]
    powers = [1 << n for n in range(gpus.bit_length()) if 1 << n <= gpus]
    in_node = [
        tp
        for tp in powers
        if tp <= machine.devices_per_node and not any(layer.heads % tp for layer in stack.kinds)
    ]
    yield from ((tp, 1) for tp in in_node)
    tp = max(in_node)
    for pp in powers[1:]:
        fits = _room(model, machine, _serving(model, machine, kind, tp, pp // 2)) > 0
        if fits or tp * pp > gpus or pp > stack.depth:
            return
        yield tp, pp


def _serving(model: ModelConfig, machine: Machine, kind: Dtype, tp: int, pp: int) -> Serving:
    ep = tp if stacks(model)[-1].experts and stacks(model)[-1].experts % tp == 0 else 1
    half = kind != "fp32" and (machine.device != "cpu" or kind in HALVES)
    return Serving(
        tp=tp, pp=pp, ep=ep, weight_bytes=BYTES[kind], cache_bytes=2.0 if half else 4.0, half=half,
        weights=next((form for form in LOSSY if form == kind), "packed"),
    )  # fmt: skip


def _steps(
    model: ModelConfig, machine: Machine, config: DeployConfig, kind: Dtype, serving: Serving
) -> Iterator[Steps]:
    """The kinds of steps to predict. With weights and without stages: our own server's launched steps, and its recorded
    steps on a GPU if a compiled step is allowed for the model. Otherwise: the steps of a server that records them."""
    if config.weights is None or serving.pp > 1 or machine.device == "other":
        yield "device"
        return
    yield "launched"
    plan = Plan(tp=serving.tp, ep=serving.ep, compile="whole")
    tried = model.graph.generates and not experts_of(model) and kind not in LOSSY
    if machine.device == "cuda" and tried and not inference_problems(plan, model):
        yield "recorded"


def _room(model: ModelConfig, machine: Machine, serving: Serving) -> float:
    """Bytes for the cache on a device."""
    return (machine.memory_bytes or 1e18) - weights_bytes(model, serving) - WORKSPACE_BYTES


def _replicas(
    model: ModelConfig, machine: Machine, arrivals: Sequence[Arrival], config: DeployConfig, kind: Dtype,
    serving: Serving, context: int,
) -> Iterator[Layout]:  # fmt: skip
    """Yield one layout with more and more replicas, until it is fast enough."""
    tp, pp = serving.tp, serving.pp
    counts = sorted({gpus // (tp * pp) for gpus in config.devices if gpus % (tp * pp) == 0})
    if not counts:
        return
    mean = sum(arrival.prompt + arrival.answer for arrival in arrivals) / len(arrivals)
    per_token, room = cache_bytes_per_token(model, serving), _room(model, machine, serving)
    longest, recorded = Limits(context=context).blocks(context), serving.steps == "recorded"
    text = recorded_bytes(model, serving, context) if recorded else per_token * mean
    slots = min(SLOTS[0], max(1, int(room / text))) if text else SLOTS[0]
    paged = max(0.0, room) / per_token if per_token else 1 << 30
    capacity = slots * longest if recorded else int(min(1 << 30, paged))
    plain = Layout(
        type=kind, tp=tp, pp=pp, replicas=counts[0], slots=0, cache_tokens=capacity, context=context,
        memory_bytes=weights_bytes(model, serving) + WORKSPACE_BYTES, spare=serving.spare, uneven=serving.uneven,
        assumption=assumption(machine, stored_on(machine, serving.weights)), steps=serving.steps,
    )  # fmt: skip
    if room < (text if recorded else per_token * longest):
        needs = plain.memory_bytes + per_token * context
        yield replace(
            plain, why=f"needs {needs / 2**30:.1f} GiB a device, which has {machine.memory_bytes / 2**30:.1f}"
        )
        return

    def costs_of(steps: Steps, slots: int) -> StepCosts:
        return predicted_costs(model, machine, replace(serving, steps=steps), slots=slots, longest=context)

    # Requests may take as long with recorded as with launched steps, which are slower on an idle server.
    idle = costs = costs_of("launched" if recorded else serving.steps, slots)
    idle_seconds = max(_alone(arrival, idle) for arrival in arrivals)
    limit = config.seconds or PATIENCE * idle_seconds
    for count in counts:
        best = None
        for number in sorted({min(size, slots) for size in SLOTS}, reverse=True):
            limits = Limits(slots=number, waiting=ENDLESS, context=context, cache=capacity)
            costs = costs_of(serving.steps, number) if recorded else idle
            served = simulate(arrivals, limits, costs, replicas=count)
            if best is None or served.latency.p95 < best[1].latency.p95:
                best = number, served, costs
            if served.latency.p95 <= limit:
                break
        assert best is not None
        number, served, costs = best
        late = ""
        if served.latency.p95 > limit:
            late = f"95 % of requests take up to {served.latency.p95:.3g} s, more than {limit:.3g} s"
            if idle_seconds > limit:
                late = f"even alone, a request takes up to {idle_seconds:.3g} s, more than {limit:.3g} s"
        memory = plain.memory_bytes + min(room, number * text)
        yield replace(
            plain, replicas=count, slots=number, memory_bytes=memory, served=served, costs=costs, why=late
        )
        if not late or idle_seconds > limit:
            return


def _alone(request: Arrival, costs: StepCosts) -> float:
    """Seconds that a request takes on an idle server."""
    last = request.answer - 1
    decoded = last * costs.decode(1, request.prompt + request.answer / 2) if last > 0 else 0.0
    return costs.request + costs.prefill(request.prompt) + decoded


def _rank(layout: Layout) -> tuple[bool, int, float]:
    """Sort key of layouts: fast enough first, then fewest devices, then fastest."""
    late = layout.served is None or bool(layout.why)
    return late, layout.gpus, layout.served.latency.p95 if layout.served else layout.memory_bytes


def _judged(tried: Sequence[Layout], chosen: Sequence[str], config: DeployConfig) -> Ranking:
    """Choose the fast enough layout on the fewest devices, and say for each other layout why it is not the choice."""

    allowed = sorted((layout for layout in tried if layout.type in chosen), key=_rank)
    if not allowed:
        raise ConfigError(
            f"gpus is {config.gpus}, but no layout of this model uses that many devices; allow fewer, too."
        )
    best = allowed[0] if not allowed[0].why else None
    others = [layout for layout in sorted(tried, key=_rank) if layout is not best]
    layouts = [replace(layout, why=layout.why or _loses(layout, best, chosen)) for layout in others]
    return Ranking(choice=best, layouts=(*([best] if best else []), *layouts))


def _loses(layout: Layout, best: Layout | None, chosen: Sequence[str]) -> str:
    """Why a layout that is fast enough is not the choice."""
    if best is None:
        return "fast enough, but changes results"
    assert layout.served is not None
    assert best.served is not None
    if layout.type not in chosen:
        if layout.gpus < best.gpus:
            return f"{best.gpus / layout.gpus:.2g}× cheaper, but changes results"
        faster = 1 - layout.served.latency.p95 / best.served.latency.p95
        gain = f"{faster:.0%} faster" if layout.gpus == best.gpus and faster > 0 else "no cheaper"
        return f"{gain}, and changes results"
    if layout.gpus > best.gpus:
        return f"{layout.gpus / best.gpus:.2g}× the devices"
    return f"{layout.served.latency.p95 / best.served.latency.p95 - 1:.0%} slower on as many devices"


def server_command(config: DeployConfig, machine: Machine, layout: Layout) -> list[str]:
    """The command of our own server for one replica of a layout; empty without weights, or if it cannot run it."""
    assert config.model is not None
    # Each rank of our server needs whole KV heads.
    layers = (layer for stack in stacks(config.model) for layer in stack.kinds)
    whole_heads = all(layer.kv_heads % layout.tp == 0 for layer in layers)
    split = layout.tp == 1 or (config.model.graph.generates and whole_heads and layout.type != "fp8")
    runs = machine.device != "other" and layout.pp == 1 and split and layout.type in SERVED
    if config.weights is None or not runs:
        return []
    options: dict[str, object] = {
        "device": machine.device, "dtype": "bf16" if layout.type == "fp8" else layout.type,
        "slots": layout.slots, "context": layout.context,
    }  # fmt: skip
    if layout.steps == "recorded":
        options |= {"compile": "whole", "cache": "slots"}
    else:
        options["tokens"] = min(layout.cache_tokens, layout.slots * Limits().blocks(layout.context))
    if layout.tp > 1:
        options["tp"] = layout.tp
        experts = experts_of(config.model)
        if experts and min(experts) % layout.tp == 0:
            options["ep"] = layout.tp
            options |= {} if config.loads is None else {"loads": config.loads}
            options |= {"spare_experts": layout.spare} if layout.spare else {}
    if layout.type == "fp8":
        options["weights"] = "fp8"
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return ["penstock", "serve", config.weights, *words]
