"""Checks the inputs of `penstock plan` before anything is computed: invalid numbers and contradictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cyclopts import Token

from penstock.config.convert import BadValue, convert
from penstock.config.model import ModelConfig, ViTConfig
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.planner.shapes import counted_tokens

DEGREES = ("dp", "tp", "pp", "cp")
"""The settings of a Plan whose product is its number of devices."""
BATCH = ("micro_batch", "accumulate", "dp")
"""The settings whose product is its samples per step."""


def whole(kind: Any, tokens: Sequence[Token]) -> int:
    """Parse a whole number, also in the form `1e3`. cyclopts itself would turn 8.5 into 8. Raises
    ConfigError."""
    (token,) = tokens
    try:
        found = convert(token.value, int, text=True)
    except BadValue as bad:
        raise ConfigError(f"{token.keyword} is {token.value}, but {bad}") from None
    assert isinstance(found, int)
    return found


def check_numbers(
    *,
    above_zero: Mapping[str, float | None],
    from_zero: Mapping[str, float | None],
    from_one: Mapping[str, int | None],
) -> None:
    """Raise ConfigError for every option whose number is not finite or too small. None means not given."""
    problems = [
        f"{option} is {value:g}, but must be above 0 and finite."
        for option, value in above_zero.items()
        if value is not None and not 0 < value < math.inf
    ]
    problems += [
        f"{option} is {value:g}, but must be 0 or more, and finite."
        for option, value in from_zero.items()
        if value is not None and not 0 <= value < math.inf
    ]
    problems += [
        f"{option} is {value}, but must be at least 1."
        for option, value in from_one.items()
        if value is not None and value < 1
    ]
    if problems:
        raise ConfigError(problems)


def only(option: str, others: Mapping[str, Any]) -> None:
    """Raise ConfigError naming options that have no effect together with `option`. None means not given."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ConfigError(
            f"{option} was given with {' and '.join(given)}, which it does not use; leave one out."
        )


def model_to_plan(model: ModelConfig | None, sequence: int | None = None) -> ModelConfig:
    """The requested model, with the requested `sequence` if given. Raises ConfigError."""
    if model is None:
        raise ConfigError(
            "penstock plan needs a model, such as gpt-175b; or --compute FLOPS for scaling laws."
        )
    if sequence is None:
        return model
    if isinstance(model, ViTConfig):
        raise ConfigError("--sequence is for language models; a vision model's tokens follow from its image.")
    return replace(model, sequence=sequence)


def samples_of_run(
    config: ModelConfig,
    *,
    tokens: float | None,
    images: float | None,
    epochs: float,
    price: float | None,
) -> float | None:
    """Samples of the whole run, or None if its length is not given.

    A sample counts for as many tokens as in tokens per second; for an encoder–decoder these are the
    decoder's. Raises ConfigError if both --tokens and --images are given, for images of a language model, and
    for options that need the run's length if it is not given.
    """
    if tokens is not None and images is not None:
        raise ConfigError("--tokens and --images were both given; a model is trained on one of them.")
    if images is not None and not isinstance(config, ViTConfig):
        raise ConfigError(
            "--images is for vision models; say with --tokens what a language model is trained on."
        )
    if tokens is None and images is None:
        idle = ["--epochs"] * (epochs != 1.0) + ["--price"] * (price is not None)
        length = "--images or --tokens" if isinstance(config, ViTConfig) else "--tokens"
        if idle:
            raise ConfigError(
                [
                    f"{option} has no effect without {length}, which say how long the run is."
                    for option in idle
                ]
            )
        return None
    seen = images if tokens is None else tokens / counted_tokens(config)
    assert seen is not None
    return seen * epochs


def check_line(line: Plan, gpus: int | None, global_batch: int | None) -> None:
    """Raise ConfigError if --gpus or --global-batch contradict the Plan line of --explain, which determines
    both."""
    for option, asked, said, degrees in (
        ("--gpus", gpus, line.gpus, "dp, tp, pp and cp"),
        ("--global-batch", global_batch, line.global_batch, "micro_batch, accumulate and dp"),
    ):
        if asked is not None and asked != said:
            raise ConfigError(
                f"{option} is {asked}, but the Plan line of --explain has {said} by its {degrees}; change one of "
                "them."
            )


def check_base(base: Plan, fixed: frozenset[str], gpus: int, global_batch: int | None) -> int | None:
    """Samples of a step: `global_batch`, or if that is None, the product in the --base line if it fixes all
    factors.

    Raises ConfigError if the settings that the line names allow no layout on `gpus` devices.
    """
    if global_batch is None and fixed.issuperset(BATCH):
        global_batch = base.global_batch
    problems = [*_contradiction(base, fixed, DEGREES, "--gpus", gpus)]
    if global_batch is not None:
        problems += _contradiction(base, fixed, BATCH, "--global-batch", global_batch)
    if "shard" in fixed and base.shard > 1 and base.sharding != "hsdp":
        problems.append(
            f"--base has shard={base.shard}, which needs sharding=hsdp; add sharding=hsdp, or leave shard out."
        )
    if problems:
        raise ConfigError(problems)
    return global_batch


def _contradiction(
    base: Plan, fixed: frozenset[str], factors: Sequence[str], option: str, asked: int
) -> Iterator[str]:
    """The problem if the fixed factors cannot multiply to the requested number."""
    named = [name for name in factors if name in fixed]
    product = math.prod(getattr(base, name) for name in named)
    words = " ".join(f"{name}={getattr(base, name)}" for name in named)
    if len(named) == len(factors):
        if product != asked:
            yield f"{option} is {asked}, but --base fixes {product} by {words}; change one of them."
    elif asked % product:
        yield f"{option} is {asked}, which {words} of --base ({product}) does not divide; change one of them."
