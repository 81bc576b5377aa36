"""The servers, our own and vLLM, that run what `penstock deploy` has chosen: their commands, and ours measured."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from penstock.config.formats import FORMATS, Dtype
from penstock.config.machine import Machine
from penstock.config.model import stacks
from penstock.errors import ConfigError, EnvironmentProblem
from penstock.serve.deploy import Layout, experts_of
from penstock.serve.measure import CHUNK, Client, Measured, compare
from penstock.serve.scheduler import Limits
from penstock.serve.settings import DeployConfig
from penstock.serve.traffic import Arrival

SERVED = ("fp32", "bf16", "fp16", "fp8")
"""Types of weights that Penstock and vLLM serve; with `fp8`, everything outside the blocks is bf16."""
PIECE = 8192
"""Tokens of one pass, where the server reads prompts in pieces."""
WAITING = 10_000
"""Requests that may wait: enough that none is refused, so that waiting shows as time."""
_PORT = re.compile(r":(\d+)/v1")


def files_for(config: DeployConfig, machine: Machine, layout: Layout) -> dict[str, str]:
    """Names and texts of files."""
    assert config.model is not None
    model = config.weights or config.called
    files: dict[str, str] = {}
    # Each rank of ours has whole KV heads.
    whole_heads = all(one.kv_heads % layout.tp == 0 for stack in stacks(config.model) for one in stack.kinds)
    split = layout.tp == 1 or (config.model.graph.generates and whole_heads and layout.type != "fp8")
    if machine.device == "other":
        return {}
    if config.weights is not None and layout.pp == 1 and split and layout.type in SERVED:
        files["penstock.sh"] = _script(
            "Penstock, one server for each replica", penstock(config, model, machine, layout)
        )
    decoder = config.model.graph.generates and not config.model.graph.remembered
    if decoder and machine.device == "cuda" and layout.type in SERVED:
        files["vllm.sh"] = _script("vLLM, one server over all replicas", vllm(model, layout))
    return files


def penstock(config: DeployConfig, model: str, machine: Machine, layout: Layout) -> list[str]:
    """The command of our own server, for one replica."""
    options: dict[str, object] = {
        "device": machine.device, "dtype": _computed(layout),
        "slots": layout.slots, "context": layout.context,
    }  # fmt: skip
    if layout.steps == "recorded":
        options |= {"compile": "whole", "cache": "slots"}
    else:
        options["tokens"] = min(layout.cache_tokens, layout.slots * Limits().blocks(layout.context))
    if layout.tp > 1:
        options["tp"] = layout.tp
        experts = experts_of(config.model) if config.model is not None else []
        if experts and min(experts) % layout.tp == 0:
            options["ep"] = layout.tp
            options |= {} if config.loads is None else {"loads": config.loads}
            options |= {"spare_experts": layout.spare} if layout.spare else {}
    if layout.type == "fp8":
        options["weights"] = "fp8"
    return ["penstock", "serve", model, *_words(options)]


def vllm(model: str, layout: Layout) -> list[str]:
    """The command of vLLM (docs.vllm.ai, "Engine Arguments")."""
    options = {
        "dtype": FORMATS[_computed(layout)].dtype,
        "tensor-parallel-size": layout.tp, "pipeline-parallel-size": layout.pp,
        "data-parallel-size": layout.replicas, "max-num-seqs": layout.slots, "max-model-len": layout.context,
        "max-num-batched-tokens": max(PIECE, layout.slots),
    }  # fmt: skip
    if layout.type == "fp8":
        options["quantization"] = "fp8"
    return ["vllm", "serve", model, *_words(options), "--enable-chunked-prefill"]


def _computed(layout: Layout) -> Dtype:
    """The type that everything outside of products in fp8 is computed in."""
    return "bf16" if layout.type == "fp8" else layout.type


def _words(options: Mapping[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _script(about: str, command: list[str]) -> str:
    return f"#!/bin/sh\n# {about}.\nexec {shlex.join(command)}\n"


def measure(config: DeployConfig, machine: Machine, layout: Layout, arrivals: Sequence[Arrival]) -> Measured:
    """Start the choice, time its steps, and send it the traffic.

    Raises ConfigError for a choice that this machine's server does not run, and EnvironmentProblem where it does not
    start.
    """
    assert config.model is not None
    assert config.weights is not None
    if layout.gpus > 1 or layout.type not in SERVED:
        raise ConfigError(
            f"--measure starts one server on one device, but the choice is {layout.words()}; use --gpus 1."
        )
    if not config.model.graph.generates:
        raise ConfigError(
            "--measure sends prompts to be continued, and an encoder makes vectors; leave it out."
        )
    vocabulary: int = getattr(config.model, "vocabulary", 2)
    with server_started(penstock(config, config.weights, machine, layout)[1:]) as port:
        client = Client(host="127.0.0.1", port=port, vocabulary=vocabulary)
        return asyncio.run(compare(client, arrivals, limits_of(layout)))


def limits_of(layout: Layout) -> Limits:
    """The limits of a layout's server."""
    return Limits(
        slots=layout.slots, waiting=WAITING, context=layout.context, chunk=CHUNK, pieces=True,
        cache=min(layout.cache_tokens, layout.slots * Limits().blocks(layout.context)),
    )  # fmt: skip


@contextmanager
def server_started(words: Sequence[str]) -> Iterator[int]:
    """Run `penstock` with the words of our server, and yield the port that it listens on.

    Raises EnvironmentProblem where it does not start.
    """
    words = [*words, "--port", "0", "--waiting", str(WAITING)]
    process = subprocess.Popen([sys.executable, "-m", "penstock", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = _PORT.search(process.stdout.readline())
        if port is None:
            raise EnvironmentProblem(
                f"The server has not started; run it alone to see why: penstock {' '.join(words)}"
            )
        yield int(port[1])
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
