"""The settings of `penstock serve` and `penstock deploy`, the same in Python, in a file and on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from penstock.boundary.files import quoted
from penstock.config.convert import Checked, Count, FilledText, Natural, NotNegative, Positive, Range, Seed
from penstock.config.formats import Weights, WeightType
from penstock.config.model import ModelConfig, title
from penstock.config.plan import Plan
from penstock.config.rules import inference_problems

_GPUS = re.compile(r"([1-9]\d{0,6})(?:\.\.([1-9]\d{0,6}))?")
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(ms|s|min)?")
_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, None: 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployConfig(Checked):
    """The model to serve, its requests, and the required speed."""

    model: ModelConfig | None = None
    """Name of a preset (`llama3-8b`), or a folder of weights: a run's export, or one of transformers'."""
    weights: FilledText | None = None
    """The folder of weights, for the script that is written; the model is read from it."""
    name: FilledText | None = None
    """Name of the model in the output; by default the name of its folder or preset."""
    machine: FilledText = "h100"
    """Name of a known machine, a file that probe wrote, or `here`."""
    gpus: FilledText = "1..8"
    """Devices: a number, or a range such as 1..8, of which the smallest sufficient number is used."""
    requests: FilledText = "rate=1 in=512 out=128"
    """Requests per second and tokens of prompts and answers (`in=64..512` is a range), or a file of lines
    {"at": SECONDS, "in": TOKENS, "out": TOKENS}."""
    p95_latency: FilledText | None = None
    """95 % of requests must have their last token within this time, such as 2s or 800ms."""
    types: tuple[WeightType, ...] = ("auto",)
    """Types of weights to choose from; `auto` is half precision on a GPU and fp32 on a CPU. Types of 8 bits or fewer
    change results, so they are chosen only if named."""
    loads: FilledText | None = None
    """Record of experts' loads, for a mixture of experts: a run's output folder, or the output of `penstock experts RUN
    --json`. It is used to place experts, with and without replicas, and to predict the busiest device. Without a
    record, visits to experts are assumed to be even."""
    price: NotNegative | None = None
    """Price of one device hour: gives the cost of a million tokens."""
    count: Annotated[int, Range(10, 1_000_000)] | None = None
    """Number of requests to simulate for a rate; by default all in ten times `p95_latency`, or in a minute."""
    seed: Seed = 0
    """Seed of the arrival times of a rate's requests."""
    top: Count = 10
    """Number of layouts to show."""
    output: FilledText | None = None
    """Folder for penstock.sh, the script that starts the choice with `penstock serve`, if that can run the model."""
    json: bool = False
    """Print everything as JSON."""

    @property
    def called(self) -> str:
        """The model's name in the output."""
        return self.name or ("" if self.model is None else title(self.model))

    @property
    def devices(self) -> range:
        """The allowed numbers of devices."""
        match = _GPUS.fullmatch(self.gpus)
        assert match is not None
        return range(int(match[1]), int(match[2] or match[1]) + 1)

    @property
    def lasting(self) -> float:
        """Seconds of traffic that are enough to show whether a queue grows."""
        return 60.0 if self.seconds is None else 10 * self.seconds

    @property
    def seconds(self) -> float | None:
        """`p95_latency` in seconds."""
        if self.p95_latency is None:
            return None
        match = _TIME.fullmatch(self.p95_latency.strip())
        assert match is not None
        return float(match[1]) * _UNITS[match[2]]

    def _problems(self) -> Iterator[str]:
        if _GPUS.fullmatch(self.gpus) is None or not self.devices:
            yield f"gpus is {quoted(self.gpus)}, but must be a number of devices, or a range such as 1..8."
        time = self.p95_latency
        if time is not None and (_TIME.fullmatch(time.strip()) is None or not self.seconds):
            yield f"p95_latency is {quoted(time)}, but must be a time such as 2s or 800ms."
        if not self.types:
            yield "types is empty; name a type of weights, or leave it out."


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(Checked):
    """One model over HTTP."""

    model: FilledText | None = None
    """A run's export, a folder that transformers wrote, or a name on the Hugging Face hub."""
    host: FilledText = "127.0.0.1"
    """Address to listen on; 0.0.0.0: every network that this machine is on."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """Port to listen on; 0: any free port."""
    name: FilledText | None = None
    """Name of the model for clients; by default the name of its run, of its folder or on the hub."""
    api_key_file: FilledText | None = None
    """File with the key that clients must send; by default $PENSTOCK_API_KEY. Without either no key is needed."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type that the model computes in."""
    weights: Weights = "auto"
    """How the weights of linear layers are stored, as in `penstock generate`."""
    device: FilledText = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    slots: Annotated[int, Range(1, 4096)] = 16
    """Texts that are generated together."""
    waiting: Natural = 64
    """Requests that may wait for a slot; more are refused with 429."""
    tp: Annotated[int, Range(1, 64)] = 1
    """Devices of this machine that split each layer, with one process each."""
    ep: Annotated[int, Range(1, 256)] = 1
    """Devices of this machine that host the experts of a mixture, with one process each: a multiple of `tp`. Devices of
    a `tp` group share texts; otherwise each device has its own texts."""
    loads: FilledText | None = None
    """Record of experts' loads that decides which of the `ep` devices hosts which experts at the start: a run's output
    folder, or the output of `penstock experts RUN --json`. Without a record, each device hosts the same number."""
    spare_experts: Natural = 0
    """Replicas of experts in each mixture, in addition to one copy of each."""
    labels: tuple[str, ...] = ()
    """Labels of texts: only the experts of these labels are loaded, for a model whose router is `given`; none: all."""
    rebalance: Natural = 0
    """Steps after which experts may move to other devices, by the loads since the last check; 0: experts stay."""
    context: Count | None = None
    """Maximum tokens of a text, prompt and new tokens; by default the model's number of positions."""
    cache: Literal["slots", "paged"] = "paged"
    """`paged`: all texts share one cache in blocks, and prompts with the same beginning share blocks."""
    tokens: Count | None = None
    """Tokens of the paged cache; by default enough for all slots."""
    compile: Literal["none", "whole"] = "none"
    """`whole`: the decoding step of all slots is one graph, compiled before the first request. Needs cache=slots."""
    chunk: Count = 512
    """Tokens of prompts that are read between two steps, so that running texts do not stall."""
    seconds: Positive = 300.0
    """Seconds after which an unfinished request is ended."""
    body_seconds: Positive = 20.0
    """Seconds after which a request is refused if its body has not arrived."""
    body_bytes: Annotated[int, Range(1024, 1 << 28)] | None = None
    """Maximum bytes of a request's body; by default 1 MiB, and 32 MiB if the model reads images."""
    unread_seconds: Positive = 60.0
    """Seconds after which a client that reads nothing of a waiting answer is disconnected; it may read slowly."""
    cors: tuple[str, ...] = ()
    """Origins of web pages whose scripts may send requests, such as https://example.org; `*`: all. None: no page."""
    stop_seconds: Positive = 30.0
    """Seconds that unfinished requests get when the server is asked to stop."""
    stall_seconds: Positive = 300.0
    """Seconds without a token after which a worker with requests is replaced."""

    def _problems(self) -> Iterator[str]:
        if max(self.tp, self.ep) > 1 and self.device.startswith("cuda:"):
            degree = f"tp={self.tp}" if self.ep == 1 else f"ep={self.ep}"
            yield f"device is {quoted(self.device)}, but {degree} needs a GPU for each process; use device=cuda."
        if self.ep % self.tp and self.ep > 1:
            yield f"ep={self.ep} devices host experts, and tp={self.tp} of them share texts; make ep a multiple of tp."
        if self.ep > self.tp and self.tokens is not None:
            yield (
                f"tokens is the size of one shared cache, but with ep={self.ep} each device has its own, as large as "
                "its slots need; leave it out."
            )
        for name, unset in (("loads", None), ("spare_experts", 0), ("rebalance", 0)):
            if self.ep == 1 and getattr(self, name) != unset:
                yield f"{name} is for experts on several devices; set ep to 2 or more, or leave it out."
        if self.compile != "none" and self.cache == "paged":
            yield f"compile={self.compile} needs a contiguous cache; use cache=slots."
        plan = Plan(tp=self.tp, dp=max(1, self.ep // self.tp), ep=self.ep, compile=self.compile)
        yield from inference_problems(plan, weights=self.weights, prefix="")
