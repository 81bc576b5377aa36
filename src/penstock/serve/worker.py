"""The process that holds the model: it receives requests from the server, runs the engine, and sends tokens back.

A crash of this process, or of a library that it uses, ends no connection: the server starts another one. Between two
steps of the engine it checks for messages, and it never waits while there is work.
"""

from __future__ import annotations

import base64
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.config.decoding import Decoding
from penstock.config.load import from_dict
from penstock.errors import ConfigError, PenstockError
from penstock.launch.local import Closed, JsonLink
from penstock.serve.scheduler import Job, Limits, Scheduler

if TYPE_CHECKING:
    from penstock.config.model import ModelConfig
    from penstock.serve.balance import Slots as Hosted


class Slots(Protocol):
    """The part of `penstock.decode.engine.Engine` that is used here."""

    def require(self, request: Any) -> None: ...

    def admit(self, request: Any) -> int | None: ...

    def step(self, chunk: int | None = None) -> Sequence[tuple[int, tuple[int, ...], str, int | None]]: ...

    def release(self, slot: int) -> None: ...


class Opened(NamedTuple):
    """A model that is ready to serve."""

    engine: Slots | None
    """None if the model generates no text."""
    request: Callable[..., Any]
    """Makes an engine's request from `ids`, `decoding` and `route`."""
    about: dict[str, Any]
    """Facts for the server: `images` (whether the model reads images), `context` (maximum tokens of a text), `source`
    (maximum tokens of an encoder–decoder's source), `labels` (which choose experts), `labels_in_prompts`, `classes`
    (their names), and `mixtures` (names of the mixtures whose experts several ranks host)."""
    answers: Mapping[str, Callable[..., Any]] = {}
    """Functions that answer requests for something other than tokens, by the names in `_MISSING`: vectors of lists of
    token numbers, probabilities of the classes of such lists or of images, and `penstock.infer.score.Scorer`."""
    ranks: Any = None
    """The engine, if several ranks split its layers or host experts: see `penstock.serve.led`."""
    experts: Callable[[], dict[str, Any] | None] | None = None
    """Returns `Balance.state` if it has changed since the last call; None if the model hosts no experts."""


_MISSING = {
    "vectors": "Only encoders of texts make embeddings.",
    "classes": "Only models with a head for classes classify, and only on one device.",
    "scores": "Only decoders on one device return log-probabilities; leave logprobs out.",
}
"""Requests for something other than tokens, and what is wrong if the model does not answer them."""


class Worker:
    """One model and the requests that it serves."""

    def __init__(self, opened: Opened, limits: Limits, link: JsonLink) -> None:
        self.opened, self.link = opened, link
        self.scheduler = Scheduler(limits)
        self._slots: dict[int, Job] = {}

    def run(self) -> None:
        """Serve until the server asks this process to stop. Raises Closed once the server is gone."""
        while True:
            timeout = 0.0 if self.scheduler.running or self.scheduler.waiting else None
            while (message := self.link.receive(timeout)) is not None:
                if "stop" in message:
                    return
                self._take(message)
                timeout = 0.0
            self._turn()

    def _take(self, message: dict[str, Any]) -> None:
        if "cancel" in message:
            self._drop(message["cancel"])
            return
        number = message["job"]
        try:
            if (kind := message.get("compute")) is not None:
                if kind not in self.opened.answers:
                    raise ConfigError(_MISSING[kind])
                self.link.send(answer=[number, self.opened.answers[kind](*message["arguments"])])
                return
            if self.opened.engine is None:
                raise ConfigError("This model generates no text.")
            decoding = from_dict(Decoding, message["decoding"], origin="the request")
            request = self.opened.request(
                ids=tuple(message["ids"]), decoding=decoding, route=message.get("route")
            )
            self.opened.engine.require(request)
            # The decoder that translates a source begins with one token.
            uncached = len(request.ids) - 1 if self.opened.about.get("source") else 0
            self.scheduler.submit(
                Job(number, len(request.ids), request.max_tokens, request, uncached=uncached)
            )
        except PenstockError as error:
            self.link.send(failed=[number, str(error)])

    def _drop(self, number: int) -> None:
        job = self.scheduler.remove(number)
        if job is not None and job.slot is not None:
            del self._slots[job.slot]
            assert self.opened.engine is not None
            self.opened.engine.release(job.slot)

    def _turn(self) -> None:
        turn = self.scheduler.turn()
        if not turn:
            return
        engine = self.opened.engine
        assert engine is not None
        for read in turn.reads:
            if not read.start:
                read.job.slot = engine.admit(read.job.request)
                assert read.job.slot is not None, "the scheduler counts slots and cache as the engine does"
                self._slots[read.job.slot] = read.job
            self.scheduler.has_read(read)
        pieces = []
        for slot, tokens, finished, end in engine.step(self.scheduler.limits.chunk):
            number = self._slots[slot].number
            pieces.append([number, list(tokens), finished, end])
            if finished:
                self._drop(number)
        if pieces:
            self.link.send(pieces=pieces)
        if self.opened.experts is not None and (state := self.opened.experts()) is not None:
            self.link.send(experts=state)


def opened(settings: dict[str, Any]) -> Opened:
    """Open the model of `penstock serve`, with its engine."""
    from penstock.config.decoding import InferConfig
    from penstock.config.model import stacks, vocabulary_of
    from penstock.config.rule import divisors
    from penstock.models.convert import model_in
    from penstock.serve.led import plan_of

    degrees = plan_of(settings)
    plan = replace(InferConfig(dtype=settings["dtype"]).as_plan, tp=degrees.tp, dp=degrees.dp, ep=degrees.ep)
    config = model_in(settings["model"])
    for kv in {layer.kv_heads for stack in stacks(config) for layer in stack.kinds} if config else ():
        if kv % degrees.tp:  # before ranks are started
            raise ConfigError(
                f"tp={degrees.tp} does not divide the model's {kv} KV heads; use a tp of {divisors(kv)}."
            )
    about: dict[str, Any] = {
        "writes": config is None or config.graph.writer is not None,
        "vocabulary": 0 if config is None else vocabulary_of(config),
        "source": 0,
    }
    answers: dict[str, Callable[..., Any]] = {}
    if config is not None and config.graph.classes is not None and plan.gpus == 1:
        answers["classes"] = classes = _Classes(settings, plan)
        about["classes"] = classes.names
    if about["writes"]:
        return _opened_writer(settings, plan, config, about, answers)
    return _opened_encoder(settings, plan, config, about, answers)


def _opened_encoder(
    settings: dict[str, Any], plan: Any, config: Any, about: dict[str, Any], answers: dict[str, Any]
) -> Opened:
    """Open a model that generates no tokens, but vectors of texts or classes of images."""
    from penstock.decode.engine import Request
    from penstock.infer.encode import Embedder
    from penstock.serve.led import LedVectors, join

    model, device = settings["model"], settings["device"]
    if settings["compile"] != "none":
        raise ConfigError(
            f"compile={settings['compile']} compiles the steps that generate tokens, and this model generates none; "
            "leave it out."
        )
    if config.graph.vision:
        if not answers:
            raise ConfigError(
                f"{model} reads images, and penstock serve only classifies images, on one device: name a classifier of "
                "images, and leave --tp out. `penstock sample` makes images."
            )
        return Opened(None, Request, about | {"images": True, "context": 1}, answers)
    if plan.gpus > 1 and plan.gpus == plan.dp:  # the embedder refuses other Plans for several devices
        device = join(settings)[1]
    embedder = Embedder(model, plan, weights=settings["weights"], device=device)
    vectors = LedVectors(embedder)
    about |= {"context": config.graph.runs[0].max_tokens}
    ranks = None if embedder.dims.alone else vectors
    return Opened(None, Request, about, answers | {"vectors": vectors}, ranks)


def _opened_writer(
    settings: dict[str, Any], plan: Any, config: Any, about: dict[str, Any], answers: dict[str, Any]
) -> Opened:
    """Open a model that generates tokens, with its engine."""
    from penstock.decode.engine import Engine, Request
    from penstock.decode.static import Compiled
    from penstock.infer.load import loaded
    from penstock.infer.score import Scorer
    from penstock.models.experts import MixtureOfExperts
    from penstock.parallel import ALONE
    from penstock.parallel.hosts import rounds_of
    from penstock.serve.balance import Balance
    from penstock.serve.led import Led, join

    dims, device = join(settings) if plan.gpus > 1 else (ALONE, settings["device"])
    start = loaded(
        settings["model"], plan, weights=settings["weights"], tokenizer=None, device=device, dims=dims,
        slots=_hosted(settings, config), only=settings["labels"],
    )  # fmt: skip
    model, graph = start.model, start.model.graph
    slots, tokens = -(-settings["slots"] // dims.data_world), settings["tokens"]
    if dims.data_world > 1:  # enough cache for any texts that get this device's slots
        positions = graph.written[-1].max_tokens + 1
        tokens = slots * Limits().blocks(min(settings["context"] or positions, positions))
    compiled = None if settings["compile"] == "none" else Compiled(model)
    engine = Engine(
        model, slots=slots, context=settings["context"], cache=settings["cache"], tokens=tokens,
        block=Limits().block, chunk=settings["chunk"], start=start.start, ends=start.ends, compiled=compiled,
    )  # fmt: skip
    if compiled is not None:
        engine.warm()
    about |= {
        "context": engine.context, "source": graph.remembered[0].max_tokens if graph.remembered else 0,
        "usual": _served(start.usual, dims.main), "labels": list(start.labels.names),
        "labels_in_prompts": start.labels.in_prompts,
    }  # fmt: skip
    if dims.alone:
        if graph.form == "causal tokens":
            answers["scores"] = Scorer(model)
        return Opened(engine, Request, about, answers)
    rounds, balance = rounds_of(model), None
    if rounds is not None and dims.main:
        balance = Balance(settings["rebalance"], [hosts.slots for hosts in rounds.hosts], time.monotonic)
        modules = model.named_modules()
        about["mixtures"] = [name for name, module in modules if isinstance(module, MixtureOfExperts)]
    led = Led(engine, dims, balance)
    return Opened(led, Request, about, answers, led, None if balance is None else balance.news)


def _served(usual: Mapping[str, Any], main: bool) -> dict[str, Any]:
    """The folder's generation settings, without those of beam search, which the server does not do."""
    from penstock.infer.usual import SEARCH, report_dropped

    if main:
        report_dropped({*usual} & {*SEARCH}, set())
    return {name: value for name, value in usual.items() if name not in SEARCH}


class _Classes:
    """Classifies texts, or images in base64. The model with its head is opened at the first request for classes: until
    then a server that also generates text keeps no second copy of the layers that both share."""

    def __init__(self, settings: dict[str, Any], plan: Any) -> None:
        from penstock.boundary.hub import local_weights
        from penstock.models.convert.files import settings_in
        from penstock.models.convert.pretrained import read_config

        self._settings, self._plan = settings, plan
        self._opened: Any = None
        folder = local_weights(settings["model"])
        head, names = read_config(folder).graph.classes, settings_in(folder).get("id2label")
        assert head is not None
        known = names if isinstance(names, dict) else {}
        self.names = [str(known.get(str(number), number)) for number in range(head.classes)]

    def __call__(self, rows: list[Any]) -> list[list[float]]:
        from penstock.infer.encode import Classifier

        if self._opened is None:
            named = {name: self._settings[name] for name in ("weights", "device")}
            self._opened = Classifier(self._settings["model"], self._plan, **named)
        if self._opened.reads_images:
            rows = [base64.b64decode(row) for row in rows]
        return [list(answer.probabilities) for answer in self._opened.classify(rows)]


def _hosted(settings: dict[str, Any], config: ModelConfig | None) -> list[Hosted]:
    """The experts of each rank, for each mixture, as the settings say; empty if all ranks host the same number."""
    from penstock.planner.loads import LoadRecord, read_loads
    from penstock.serve.balance import slots_by
    from penstock.serve.deploy import experts_of

    if config is None or (settings["loads"] is None and not settings["spare_experts"]):
        return []
    experts = experts_of(config)
    if settings["loads"] is not None:
        record = read_loads(Path(settings["loads"]))
    else:
        record = LoadRecord(tuple(map(str, range(len(experts)))), (), tuple(((1,) * n,) for n in experts))
    return slots_by(record, experts, settings["ep"], settings["spare_experts"])


def limits_of(settings: dict[str, Any], about: dict[str, Any]) -> Limits:
    """The scheduler's limits for an engine that has been opened."""
    cache = Limits().blocks(settings["tokens"] or settings["slots"] * about["context"])
    return Limits(
        slots=settings["slots"], waiting=settings["waiting"], context=about["context"], chunk=settings["chunk"],
        cache=cache if settings["cache"] == "paged" else 1 << 30,
    )  # fmt: skip


def main(handle: int) -> None:
    """Serve over the socket `handle`: its first message holds the settings, and the function that opens the model."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process once all requests are done
    link = JsonLink(socket.socket(fileno=handle))
    try:
        first = link.receive()
        assert first is not None
        module, _, name = first["opener"].partition(":")
        settings = first["settings"]
        try:
            model: Opened = getattr(importlib.import_module(module), name)(settings)
            limits = limits_of(settings, model.about)
        except PenstockError as problem:
            link.send(fatal=[str(problem), int(problem.exit_code)])
            return
        if model.ranks is not None and model.ranks.dims.rank:
            model.ranks.follow()
        else:
            link.send(ready=model.about | {"process": os.getpid()})
            Worker(model, limits, link).run()
        if model.ranks is not None:
            model.ranks.dismiss()
            os._exit(0)  # in a normal exit gloo may abort, after all work is done
    except Closed:
        return


if __name__ == "__main__":
    main(int(sys.argv[1]))
