"""The process that holds the model: it takes requests from the server, runs the engine, and sends tokens back.

It is a process of its own, so that a fault in it, or in a library below it, ends no connection: the server starts
another. Between two steps of the engine it looks whether messages have come, and never waits while there is work.
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
    """None of a model that makes vectors."""
    vectors: Any
    """Function of lists of token numbers to their vectors; None of a model that makes text."""
    request: Callable[..., Any]
    """Makes an engine's request from `ids`, `decoding` and `route`."""
    about: dict[str, Any]
    """Facts for the server: `images` (whether it reads those), `context` (tokens of a text), `source` (of an
    encoder–decoder's source), `labels` (which choose experts), `labels_in_prompts`, and `mixtures` (names of
    those whose experts several ranks host)."""
    scores: Any = None
    """Function of a text's token numbers, and how many of the likeliest are wanted in each place, to what
    `penstock.infer.score.Scorer` gives; None of a model that is no decoder, or on several devices."""
    ranks: Any = None
    """The engine, where several ranks split its layers or host experts: see `penstock.serve.led`."""
    experts: Callable[[], dict[str, Any] | None] | None = None
    """News of hosted experts since the last call, as of `Balance.state`; None where there are none."""
    classes: Any = None
    """Function of lists of token numbers, or of images, to the probabilities of their classes, whose names are in
    `about`; None of a model without a head for classes, or on several devices."""


_ANSWERS = {
    "texts": ("vectors", "Only encoders of texts make embeddings."),
    "classify": ("classes", "Classes come from models with a head for them, on one device."),
    "score": ("scores", "Log-probabilities are given by decoders on one device; leave logprobs out."),
}
"""Requests that are not for tokens: the function of `Opened` that answers each, and what is wrong without it."""


class Worker:
    """One model and the requests that it serves."""

    def __init__(self, opened: Opened, limits: Limits, link: JsonLink) -> None:
        self.opened, self.link = opened, link
        self.scheduler = Scheduler(limits)
        self._requests: dict[int, Any] = {}
        self._slots: dict[int, Job] = {}
        self._places: dict[int, int] = {}

    def run(self) -> None:
        """Serve until the server asks to stop, or has gone."""
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
            if wanted := next((kind for kind in _ANSWERS if kind in message), None):
                name, problem = _ANSWERS[wanted]
                compute = getattr(self.opened, name)
                if compute is None:
                    raise ConfigError(problem)
                more = [message["top"]] if wanted == "score" else []
                self.link.send(answer=[number, compute(message[wanted], *more)])
                return
            if self.opened.engine is None:
                raise ConfigError("This model makes no text.")
            decoding = from_dict(Decoding, message["decoding"], origin="the request")
            route = message.get("route")
            request = self.opened.request(ids=tuple(message["ids"]), decoding=decoding, route=route)
            self.opened.engine.require(request)
            self.scheduler.submit(Job(number, len(request.ids), request.max_tokens))
            self._requests[number] = request
        except PenstockError as error:
            self.link.send(failed=[number, str(error)])

    def _drop(self, number: int) -> None:
        self.scheduler.remove(number)
        self._requests.pop(number, None)
        slot = self._places.pop(number, None)
        if slot is not None:
            del self._slots[slot]
            assert self.opened.engine is not None
            self.opened.engine.release(slot)

    def _turn(self) -> None:
        turn = self.scheduler.turn()
        if not turn:
            return
        engine = self.opened.engine
        assert engine is not None
        for read in turn.reads:
            if not read.start:
                slot = engine.admit(self._requests[read.job.number])
                assert slot is not None, "the scheduler counts slots and cache as the engine does"
                self._slots[slot], self._places[read.job.number] = read.job, slot
            self.scheduler.has_read(read)
        made = []
        for slot, tokens, finished, end in engine.step(self.scheduler.limits.chunk):
            number = self._slots[slot].number
            made.append([number, list(tokens), finished, end])
            if finished:
                self._drop(number)
        if made:
            self.link.send(made=made)
        if self.opened.experts is not None and (state := self.opened.experts()) is not None:
            self.link.send(experts=state)


def opened(settings: dict[str, Any], limits: Limits) -> Opened:
    """The model that `penstock serve` names, with its engine."""
    from penstock.config.decoding import InferConfig
    from penstock.config.model import vocabulary_of
    from penstock.models.convert import model_in
    from penstock.serve.led import plan_of

    degrees = plan_of(settings)
    plan = replace(InferConfig(dtype=settings["dtype"]).as_plan, tp=degrees.tp, dp=degrees.dp, ep=degrees.ep)
    config = model_in(settings["model"])
    about: dict[str, Any] = {
        "writes": config is None or config.graph.writer is not None,
        "vocabulary": 0 if config is None else vocabulary_of(config),
        "source": 0,
    }
    classes = None
    if config is not None and config.graph.classes is not None and plan.gpus == 1:
        classes = _Classes(settings, plan)
        about["classes"] = classes.names
    if about["writes"]:
        return _opened_writer(settings, limits, plan, config, about, classes)
    return _opened_encoder(settings, plan, config, about, classes)


def _opened_encoder(
    settings: dict[str, Any], plan: Any, config: Any, about: dict[str, Any], classes: Any
) -> Opened:
    """A model that makes no tokens: vectors of texts, or classes of images."""
    from penstock.decode.engine import Request
    from penstock.infer.encode import Embedder
    from penstock.serve.led import LedVectors, join

    where, device = settings["model"], settings["device"]
    if settings["compile"] != "none":
        raise ConfigError(
            f"compile={settings['compile']} is for steps that make tokens, which this model does not; leave it out."
        )
    if config.graph.vision:
        if classes is None:
            raise ConfigError(
                f"{where} reads images, of which penstock serve tells classes, on one device: give a classifier of "
                "images, and leave --tp out. `penstock sample` makes images."
            )
        return Opened(None, None, Request, about | {"images": True, "context": 1}, classes=classes)
    if plan.gpus > 1 and plan.gpus == plan.dp:  # else the embedder refuses
        device = join(settings)[1]
    embedder = Embedder(where, plan, weights=settings["weights"], device=device)
    vectors = LedVectors(embedder)
    about |= {"context": config.graph.runs[0].max_tokens}
    ranks = None if embedder.dims.alone else vectors
    return Opened(None, vectors, Request, about, ranks=ranks, classes=classes)


def _opened_writer(
    settings: dict[str, Any], limits: Limits, plan: Any, config: Any, about: dict[str, Any], classes: Any
) -> Opened:
    """A model that makes tokens, with the engine that does."""
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
    hosted = _hosted(settings, config) if plan.ep > 1 else ()
    start = loaded(
        settings["model"], plan, weights=settings["weights"], tokenizer=None, device=device, dims=dims,
        slots=hosted, only=settings["labels"],
    )  # fmt: skip
    own, tokens, graph = -(-limits.slots // dims.data_world), settings["tokens"], start.model.graph
    if dims.data_world > 1:  # any texts that get slots of one device find room in its cache
        most = graph.written[-1].max_tokens + 1
        tokens = own * limits.blocks(min(settings["context"] or most, most))
    compiled = None if settings["compile"] == "none" else Compiled(start.model)
    engine = Engine(
        start.model, slots=own, context=settings["context"], cache=settings["cache"], tokens=tokens,
        block=limits.block, chunk=limits.chunk, start=start.start, ends=start.ends, compiled=compiled,
    )  # fmt: skip
    if compiled is not None:
        engine.warm()
    rounds, balance = rounds_of(start.model), None
    if rounds is not None and dims.main:
        balance = Balance(settings["rebalance"], [hosts.slots for hosts in rounds.hosts], time.monotonic)
        names = [name for name, module in start.model.named_modules() if isinstance(module, MixtureOfExperts)]
        about["mixtures"] = names
    led = None if dims.alone else Led(engine, dims, balance)
    about |= {
        "context": engine.context, "source": graph.remembered[0].max_tokens if graph.remembered else 0,
        "usual": _served(start.usual, dims.main), "labels": list(start.labels.names),
        "labels_in_prompts": start.labels.in_prompts,
    }  # fmt: skip
    scores = Scorer(start.model) if dims.alone and graph.form == "causal tokens" else None
    news = None if balance is None or led is None else led.experts_news
    return Opened(led or engine, None, Request, about, scores, led, news, classes)


def _served(usual: Mapping[str, Any], main: bool) -> dict[str, Any]:
    """The folder's generation settings without beams, which slots do not search."""
    from penstock.infer.usual import SEARCH, report_dropped

    if main:
        report_dropped({*usual} & {*SEARCH}, set())
    return {name: value for name, value in usual.items() if name not in SEARCH}


class _Classes:
    """The classes of texts, or of images in base64. The head, with the layers under it, is opened with the first that
    are asked for: a server that is asked for none keeps no second copy of what a branch that writes shares with it."""

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
        return [list(one.probabilities) for one in self._opened.classify(rows)]


def _hosted(settings: dict[str, Any], config: ModelConfig | None) -> list[Hosted]:
    """The experts of each rank, for each mixture, as the settings say; none where each hosts as many."""
    from penstock.planner.loads import LoadRecord, read_loads
    from penstock.serve.balance import slots_by
    from penstock.serve.deploy import experts_of

    if config is None or (settings["loads"] is None and not settings["spare_experts"]):
        return []
    experts = experts_of(config)
    if settings["loads"] is not None:
        record = read_loads(Path(settings["loads"]))
    else:
        names = tuple(map(str, range(len(experts))))
        record = LoadRecord(names, (), tuple(((1,) * count,) for count in experts))
    return slots_by(record, experts, settings["ep"], settings["spare_experts"])


def limits_of(settings: dict[str, Any], about: dict[str, Any]) -> Limits:
    """The scheduler's limits for an engine that has been opened. Of an encoder–decoder, sources are not in the slots'
    cache, but count as prompts."""
    context = about["context"] + about["source"]
    most = settings["tokens"] or settings["slots"] * about["context"]
    return Limits(
        slots=settings["slots"], waiting=settings["waiting"], context=context, chunk=settings["chunk"],
        cache=max(most, context + 16) if settings["cache"] == "paged" else 1 << 30,
    )  # fmt: skip


def main(handle: int) -> None:
    """Serve over the socket `handle`: the first message holds the settings, and by which function the model opens."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the server, which ends this process when all is done
    link = JsonLink(socket.socket(fileno=handle))
    try:
        first = link.receive()
        assert first is not None
        module, _, name = first["opener"].partition(":")
        settings = first["settings"]
        try:
            made: Opened = getattr(importlib.import_module(module), name)(settings, Limits(
                slots=settings["slots"], waiting=settings["waiting"], chunk=settings["chunk"]
            ))  # fmt: skip
            limits = limits_of(settings, made.about)
        except PenstockError as problem:
            link.send(fatal=[str(problem), int(problem.exit_code)])
            return
        if made.ranks is not None and made.ranks.dims.rank:
            made.ranks.follow()
        else:
            link.send(ready=made.about | {"process": os.getpid()})
            Worker(made, limits, link).run()
        if made.ranks is not None:
            made.ranks.dismiss()
            os._exit(0)  # in an orderly end gloo may abort, after all is done
    except Closed:
        return


if __name__ == "__main__":
    main(int(sys.argv[1]))
