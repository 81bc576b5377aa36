"""The commands with which our own server and vLLM start what `penstock deploy` has chosen."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from penstock.config.formats import FORMATS, Dtype
from penstock.config.machine import Machine
from penstock.config.model import stacks, title
from penstock.planner.serve import generates
from penstock.serve.deploy import Layout, experts_of
from penstock.serve.scheduler import Limits
from penstock.serve.settings import DeployConfig

SERVED = ("fp32", "bf16", "fp16", "fp8")
"""Types of weights that Penstock and vLLM serve; with `fp8`, everything outside the blocks is bf16."""
CHUNK = 8192
"""Tokens of one pass, where the server reads prompts in pieces."""


def files_for(config: DeployConfig, machine: Machine, layout: Layout) -> dict[str, str]:
    """Names and texts of files."""
    assert config.model is not None
    model = config.weights or title(config.model)
    files: dict[str, str] = {}
    # Each rank of ours has whole KV heads.
    whole_heads = all(stack.kv % layout.tp == 0 for stack in stacks(config.model))
    split = layout.tp == 1 or (generates(config.model) and whole_heads and layout.type != "fp8")
    if config.weights is not None and layout.pp == 1 and split and layout.type in SERVED:
        files["penstock.sh"] = _script(
            "Penstock, one server for each replica", penstock(config, model, machine, layout)
        )
    decoder = generates(config.model) and not config.model.graph.remembered
    if decoder and machine.device == "cuda" and layout.type in SERVED:
        files["vllm.sh"] = _script("vLLM, one server over all replicas", vllm(model, layout))
    return files


def penstock(config: DeployConfig, model: str, machine: Machine, layout: Layout) -> list[str]:
    """The command of our own server, for one replica."""
    options: dict[str, object] = {
        "device": machine.device, "dtype": _computed(layout),
        "slots": layout.slots, "context": layout.context,
        "tokens": min(layout.cache_tokens, layout.slots * Limits().blocks(layout.context)),
    }  # fmt: skip
    if layout.tp > 1:
        options["tp"] = layout.tp
        experts = experts_of(config.model) if config.model is not None else []
        if experts and min(experts) % layout.tp == 0:
            options["ep"] = layout.tp
            options |= {} if config.loads is None else {"loads": config.loads}
            options |= {"spare_experts": layout.spare} if layout.spare else {}
    if layout.type == "fp8":
        options["weights"] = "fp8"
    return ["penstock", "serve", model, *_words(options, "--{}")]


def vllm(model: str, layout: Layout) -> list[str]:
    """The command of vLLM (docs.vllm.ai, "Engine Arguments")."""
    options = {
        "dtype": FORMATS[_computed(layout)].dtype,
        "tensor-parallel-size": layout.tp, "pipeline-parallel-size": layout.pp,
        "data-parallel-size": layout.replicas, "max-num-seqs": layout.slots, "max-model-len": layout.context,
        "max-num-batched-tokens": max(CHUNK, layout.slots),
    }  # fmt: skip
    if layout.type == "fp8":
        options["quantization"] = "fp8"
    return ["vllm", "serve", model, *_words(options, "--{}"), "--enable-chunked-prefill"]


def _computed(layout: Layout) -> Dtype:
    """The type that everything outside of products in fp8 is computed in."""
    return "bf16" if layout.type == "fp8" else layout.type


def _words(options: Mapping[str, object], form: str) -> list[str]:
    return [word for name, value in options.items() for word in (form.format(name), str(value))]


def _script(about: str, command: list[str]) -> str:
    return f"#!/bin/sh\n# {about}.\nexec {shlex.join(command)}\n"
