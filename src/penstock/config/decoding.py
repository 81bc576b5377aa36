"""How the next tokens of a text are chosen: the settings of generation. No torch is needed to make or check them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from penstock.config.convert import (
    Checked,
    Count,
    Natural,
    Positive,
    PositiveShare,
    Probability,
    Range,
    Text,
    TypedText,
)
from penstock.config.formats import Weights
from penstock.config.plan import Plan
from penstock.errors import ConfigError

Penalty = Annotated[float, Range(-2, 2)]
Bias = Annotated[
    str,
    Text(
        r"\d{1,9}( \d{1,9}){0,999}=([+-]?\d{1,9}(\.\d{1,9})?|-inf)",
        "the numbers of one token or several and an amount, as 42=-1.5, '5 6=2' or 42=-inf",
        longest=10_000,
    ),
]
USUAL_TOKENS = 128
"""Default of `max_tokens`, if neither the model's folder nor its positions say otherwise."""
RECORDED = 16
"""Number of recorded GPU steps to keep, one per cache width (bucket) and number of texts, each with its own cache."""
_LEAST = 64
"""Columns of the smallest bucket."""


def bucket(count: int) -> int:
    """The size of the smallest bucket for `count` columns: 64, 128, 192, 256, and then four sizes per doubling, so that
    at most a fifth is empty."""
    step = max(_LEAST, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // step) * step


@dataclass(frozen=True, kw_only=True)
class Decoding(Checked, where="decoding"):
    """How a text is continued. By default each step takes the likeliest token (greedy).

    The order is that of transformers: bias, penalties, blocked n-grams, minimum lengths, forced tokens, then
    temperature, `top_k`, `top_p` and `min_p` if tokens are drawn.
    """

    max_tokens: Natural = 0
    """Maximum number of new tokens; 0: as `max_length` or the model's folder says, else 128, or fewer if the model has
    fewer positions left."""
    max_length: Natural = 0
    """Maximum number of tokens including the prompt, or the first token of an encoder–decoder's decoder; 0: any."""
    min_tokens: Natural = 0
    """Minimum number of new tokens."""
    min_length: Natural = 0
    """Minimum number of tokens, counted as for `max_length`."""
    temperature: Annotated[float, Range(0, 100)] = 0.0
    """0 takes the likeliest token; above 0, tokens are drawn with logits divided by it."""
    top_k: Natural = 0
    """Draw among this many of the likeliest tokens (Fan et al., ACL 2018); 0: among all."""
    top_p: PositiveShare = 1.0
    """Draw among the likeliest tokens whose probabilities sum to this (Holtzman et al., ICLR 2020)."""
    min_p: Probability = 0.0
    """Draw among tokens at least this many times as likely as the likeliest (Nguyen et al., ICLR 2025)."""
    repetition_penalty: Positive = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens that are already in the prompt or the text
    (Keskar et al., 2019, "CTRL", section 4.1)."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit for each time that it has been generated."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of each token that has been generated."""
    no_repeat_ngram: Natural = 0
    """No sequence of this many tokens occurs twice, including the prompt; 0: no limit."""
    bias: tuple[Bias, ...] = ()
    """Added to logits: a token id and an amount each, such as `42=-1.5`, or `42=-inf` for never. With several tokens,
    `5 6=-2`, the amount is added to the last token wherever the text ends with the ones before it."""
    forced_first: Natural | None = None
    """The token that follows the first token of an encoder–decoder's decoder, or a prompt of one token."""
    forced_last: tuple[Natural, ...] = ()
    """A text that reaches `max_tokens` ends with one of these tokens."""
    not_first: tuple[Natural, ...] = ()
    """Tokens that may not come first, after `forced_first`."""
    stop: tuple[TypedText, ...] = ()
    """Generation ends before any of these texts. Each is used exactly as typed; repeat the option for several."""
    ignore_end: bool = False
    """Whether generation continues after the model's end of text."""
    seed: Natural | None = None
    """Makes drawing repeatable, whatever else is in the batch; none: different draws each time."""
    beams: Annotated[int, Range(1, 256)] = 1
    """Number of beams that beam search keeps at each step."""
    length_penalty: Annotated[float, Range(-100, 100)] = 1.0
    """A finished beam's score is divided by its number of tokens to this power."""
    early_stopping: Literal["never", "heuristic", "full"] = "heuristic"
    """When beam search ends, as in transformers: once no beam can become better (`never`), once the best beam of this
    length cannot (`heuristic`), or once as many beams have finished as `beams` says (`full`)."""
    best: Annotated[int, Range(1, 256)] = 1
    """Number of texts returned for each prompt: the best of beam search, or independent draws."""
    speculate: Annotated[int, Range(0, 64)] = 0
    """Number of tokens that are drafted and then checked in one pass, without changing the result: by a draft model, or
    without one by copying from an earlier place in the text that begins in the same way. 0: none."""

    def _problems(self) -> Iterator[str]:
        if self.beams > 1 and self.temperature:
            yield "decoding.beams above 1 searches for likely texts and draws none; leave decoding.temperature at 0."
        if self.best > 1 and self.beams == 1 and not self.temperature:
            yield "decoding.best above 1 needs decoding.beams, or decoding.temperature above 0: else all are the same."
        if self.beams > 1 and self.best > self.beams:
            yield f"decoding.best is {self.best}, but only decoding.beams {self.beams} are kept."
        if self.max_tokens and self.min_tokens > self.max_tokens:
            yield f"decoding.min_tokens is {self.min_tokens}, above decoding.max_tokens {self.max_tokens}."
        if self.speculate and self.beams > 1:
            yield "decoding.speculate is for greedy or drawn texts; leave decoding.beams out."
        if any(not text for text in self.stop):
            yield "decoding.stop has an empty text, which would end at once; remove it."

    @property
    def biases(self) -> tuple[tuple[tuple[int, ...], float], ...]:
        """`bias` as numbers."""
        pairs = (word.split("=") for word in self.bias)
        return tuple((tuple(map(int, numbers.split())), float(amount)) for numbers, amount in pairs)

    @property
    def named_tokens(self) -> set[int]:
        """All token ids that appear in a setting."""
        forced = () if self.forced_first is None else (self.forced_first,)
        return {*forced, *self.forced_last, *self.not_first, *(n for each, _ in self.biases for n in each)}

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0

    @property
    def looks_back(self) -> bool:
        """Whether the preceding tokens change logits."""
        return bool(
            self.repetition_penalty != 1.0
            or self.frequency_penalty
            or self.presence_penalty
            or self.no_repeat_ngram
            or any(" " in word for word in self.bias)
        )

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        lengths = self.min_tokens or self.min_length
        forced = self.forced_first is not None or self.forced_last or self.not_first
        return bool(self.looks_back or self.bias or lengths or forced)


@dataclass(frozen=True, kw_only=True)
class InferConfig(Checked, where=""):
    """A trained model, and how it runs."""

    model: str = ""
    """A run's export, a folder of transformers, or a name on the Hugging Face hub."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of computation."""
    weights: Weights = "auto"
    """How the weights of linear layers are stored: `packed` in the processor's own layout, which `auto` chooses on a
    CPU; `int8` multiplies in int8, `fp8` in fp8, on GPUs that support it; the others store smaller weights. All but
    `plain` and `packed` change results."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    batch: Count = 32
    """Texts per forward pass."""
    plan: str = ""
    """How several devices, each with its own process, share the work (`penstock launch --procs N -- generate …`):
    `dp=2` splits the texts, and `dp=2 ep=2` the experts too. For generation, `tp=2` splits each layer, `pp=2` gives
    each device half of the blocks, and `compile=whole` compiles the step that generates the next tokens."""

    @property
    def as_plan(self) -> Plan:
        """The Plan of these settings."""
        plan = Plan.parse(self.plan)
        return plan if self.dtype == "fp32" else replace(plan, precision="O3", dtype=self.dtype)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `penstock.Embedder`, `Classifier` and `ImageGenerator` after the model."""
        return {"plan": self.as_plan, "weights": self.weights, "batch": self.batch, "device": self.device}

    def _problems(self) -> Iterator[str]:
        try:
            types = Plan.named(self.plan) & {"precision", "dtype"}
            Plan.parse(self.plan)
        except ConfigError as wrong:
            yield from wrong.problems
            return
        if types and self.dtype != "fp32":
            yield f"dtype={self.dtype} and the plan's {' and '.join(sorted(types))} both say the type; keep one."

    def named(self, verb: str) -> str:
        """The model. Raises ConfigError without one."""
        if not self.model:
            raise ConfigError(
                f"Say which model: `penstock {verb} MODEL …`, a run's export or a folder of transformers."
            )
        return self.model


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(InferConfig, where=""):
    """Settings of `penstock generate`."""

    decoding: Decoding = field(default_factory=Decoding)
    label: str | None = None
    """Label of the texts, such as their language, which chooses the experts if the model's router is `given`. None:
    each prompt begins with its label, if it did in training."""
    draft: str | None = None
    """A smaller model that drafts for `speculate`."""
    shortlist: str | None = None
    """A file of token ids: only these, and the end of a text, are computed and generated."""


@dataclass(frozen=True, kw_only=True)
class EncodeConfig(InferConfig, where=""):
    """Settings of `penstock embed` and `penstock classify`."""
