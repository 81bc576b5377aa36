"""The process that holds the model: it takes requests from the server, runs the engine, and sends tokens back.

It is a process of its own, so that a fault in it, or in a library below it, ends no connection: the server starts
another. Between two steps of the engine it looks whether messages have come, and never waits while there is work.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from penstock.config.decoding import Decoding
from penstock.config.load import from_dict
from penstock.errors import ConfigError, PenstockError
from penstock.serve.link import Closed, Link
from penstock.serve.scheduler import Job, Limits, Scheduler


class Slots(Protocol):
    """The part of `penstock.decode.engine.Engine` that is used here."""

    def require(self, request: Any) -> None: ...

    def admit(self, request: Any) -> int | None: ...

    def step(self, chunk: int | None = None) -> Sequence[tuple[int, tuple[int, ...], str]]: ...

    def release(self, slot: int) -> None: ...


class Opened(NamedTuple):
    """A model that is ready to serve."""

    engine: Slots | None
    """None of a model that makes vectors."""
    vectors: Any
    """Function of lists of token numbers to their vectors; None of a model that makes text."""
    request: Callable[..., Any]
    """Makes what the engine takes of `ids`, `decoding` and `route`."""
    about: dict[str, Any]
    """Facts for the server: `family`, `context` (tokens of a text), `source` (of an encoder–decoder's source), `labels`
    (which choose experts) and `labels_in_prompts`."""
    ranks: Any = None
    """The engine, where several ranks split its layers: see `penstock.serve.led`."""


class Worker:
    """One model and the requests that it serves."""

    def __init__(self, opened: Opened, limits: Limits, link: Link) -> None:
        self.opened, self.link = opened, link
        self.scheduler = Scheduler(limits)
        self._requests: dict[int, Any] = {}
        self._slots: dict[int, Job] = {}
        self._places: dict[int, int] = {}

    def run(self) -> None:
        """Serve until told to stop, or the server has gone."""
        while True:
            busy = bool(self.scheduler.running or self.scheduler.waiting)
            for message in self.link.receive(wait=not busy):
                if "stop" in message:
                    return
                self._take(message)
            self._turn()

    def _take(self, message: dict[str, Any]) -> None:
        if "cancel" in message:
            self._drop(message["cancel"])
            return
        number = message["job"]
        try:
            if "texts" in message:
                if self.opened.vectors is None:
                    raise ConfigError("This model makes text; only encoders make embeddings.")
                self.link.send({"vectors": [number, self.opened.vectors(message["texts"])]})
                return
            if self.opened.engine is None:
                raise ConfigError("This model makes no text.")
            decoding = from_dict(Decoding, message["decoding"], origin="the request")
            route = message.get("route")
            request = self.opened.request(ids=tuple(message["ids"]), decoding=decoding, route=route)
            self.opened.engine.require(request)
            self.scheduler.submit(Job(number, len(request.ids), request.max_tokens))
            self._requests[number] = request
        except PenstockError as problem:
            self.link.send({"failed": [number, str(problem)]})

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
        for slot, tokens, finished in engine.step(self.scheduler.limits.chunk):
            number = self._slots[slot].number
            made.append([number, list(tokens), finished])
            if finished:
                self._drop(number)
        if made:
            self.link.send({"made": made})


def opened(settings: dict[str, Any], limits: Limits) -> Opened:
    """The model that `penstock serve` names, with its engine."""
    from penstock.config.decoding import InferConfig
    from penstock.config.model import vocabulary_of
    from penstock.decode.engine import Engine, Request
    from penstock.decode.static import Compiled
    from penstock.infer.encode import Embedder
    from penstock.infer.load import loaded
    from penstock.models.convert import model_in
    from penstock.parallel import ALONE
    from penstock.serve.led import Led, join

    where, device = settings["model"], settings["device"]
    plan = replace(InferConfig(dtype=settings["dtype"]).as_plan, tp=settings["tp"])
    config = model_in(where)
    about = {
        "writes": config is None or config.graph.writer is not None,
        "vocabulary": 0 if config is None else vocabulary_of(config),
        "source": 0,
    }
    if config is not None and config.graph.writer is None:
        if settings["compile"] != "none":
            raise ConfigError(
                f"compile={settings['compile']} is for steps that make tokens, and this model makes vectors; leave it "
                "out."
            )
        embedder = Embedder(where, plan, weights=settings["weights"], device=device)
        return Opened(
            None,
            lambda rows: embedder.embed(rows).tolist(),
            Request,
            about | {"context": config.graph.runs[0].most, "never": []},
        )
    dims = ALONE
    if plan.tp > 1:
        dims, device = join(settings)
    found = loaded(where, plan, weights=settings["weights"], tokenizer=None, device=device, dims=dims)
    engine = Engine(
        found.model, slots=limits.slots, context=settings["context"], cache=settings["cache"],
        tokens=settings["tokens"], block=limits.block, chunk=limits.chunk, start=found.start, ends=found.ends,
        compiled=None if settings["compile"] == "none" else Compiled(found.model),
    )  # fmt: skip
    if settings["compile"] != "none":
        engine.warm()
    remembered = found.model.graph.remembered
    source = remembered[0].most if remembered else 0
    led = None if dims.alone else Led(engine, dims)
    return Opened(
        led or engine,
        None,
        Request,
        about | {
            "context": engine.context, "source": source, "never": list(found.never),
            "labels": list(found.labels.names), "labels_in_prompts": found.labels.in_prompts,
        },
        led,
    )  # fmt: skip


def limits_of(settings: dict[str, Any], about: dict[str, Any]) -> Limits:
    """The scheduler's limits for an engine that has been opened. Of an encoder–decoder, sources are not in the slots'
    cache, but count as prompts."""
    context = about["context"] + about["source"]
    most = settings["tokens"] or settings["slots"] * about["context"]
    return Limits(
        slots=settings["slots"], waiting=settings["waiting"], context=context, pieces=True, chunk=settings["chunk"],
        cache=max(most, context + 16) if settings["cache"] == "paged" else 1 << 30,
    )  # fmt: skip


def main(handle: int) -> None:
    """Serve over the socket `handle`: the first message holds the settings, and by which function the model opens."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the server, which ends this process when all is done
    link = Link(handle)
    try:
        first, *more = link.receive(wait=True)
        module, _, name = first["opener"].partition(":")
        settings = first["settings"]
        try:
            made: Opened = getattr(importlib.import_module(module), name)(settings, Limits(
                slots=settings["slots"], waiting=settings["waiting"], chunk=settings["chunk"], pieces=True
            ))  # fmt: skip
            limits = limits_of(settings, made.about)
        except PenstockError as problem:
            link.send({"fatal": [str(problem), int(problem.exit_code)]})
            return
        if made.ranks is not None and made.ranks.dims.rank:
            made.ranks.follow()
        else:
            link.send({"ready": made.about | {"process": os.getpid()}})
            worker = Worker(made, limits, link)
            for message in more:
                worker._take(message)
            worker.run()
        if made.ranks is not None:
            made.ranks.dismiss()
            os._exit(0)  # in an orderly end gloo may abort, after all is done
    except Closed:
        return


if __name__ == "__main__":
    main(int(sys.argv[1]))
