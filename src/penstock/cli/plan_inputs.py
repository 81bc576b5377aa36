"""What `penstock plan` is asked, checked before anything is computed: numbers that cannot be, and what does not fit."""

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
"""The settings of a Plan that multiply to its devices."""
BATCH = ("micro_batch", "accumulate", "dp")
"""Those that multiply to its samples per step."""


def whole(kind: Any, tokens: Sequence[Token]) -> int:
    """A whole number as it was typed, `1e3` too. cyclopts by itself would make 8 of 8.5. Raises ConfigError."""
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
    """Raise ConfigError with every option whose number is not finite, or is less than it can be; None is not given."""
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
    """Raise ConfigError naming what would be left aside beside `option`; None is not given."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ConfigError(
            f"{option} was given with {' and '.join(given)}, which it has no use for; leave one out."
        )


def model_to_plan(model: ModelConfig | None, sequence: int | None = None) -> ModelConfig:
    """The model that was asked for, with another length of sample if that was asked too. Raises ConfigError."""
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
    """Samples of the whole run, or none where nobody says how long it is.

    A sample has as many tokens as it counts for in tokens per second: an encoder–decoder's those of its decoder.
    Raises ConfigError for both of --tokens and --images, for images of a language model, and for what only a run of a
    stated length can have.
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
    """Raise ConfigError for devices or samples that the Plan line of --explain contradicts, which says them all."""
    for option, asked, said, degrees in (
        ("--gpus", gpus, line.gpus, "dp, tp, pp and cp"),
        ("--global-batch", global_batch, line.global_batch, "micro_batch, accumulate and dp"),
    ):
        if asked is not None and asked != said:
            raise ConfigError(
                f"{option} is {asked}, but the Plan line of --explain takes {said} by its {degrees}; change one of "
                "them."
            )


def check_base(base: Plan, fixed: frozenset[str], gpus: int, global_batch: int | None) -> int | None:
    """Samples of a step with what --base fixes: `global_batch`, or where that is none all that the line says.

    Raises ConfigError where the settings that the line names leave no layout on `gpus` devices, whatever the others.
    """
    if global_batch is None and fixed.issuperset(BATCH):
        global_batch = base.global_batch
    problems = [*_contradiction(base, fixed, DEGREES, "--gpus", gpus)]
    if global_batch is not None:
        problems += _contradiction(base, fixed, BATCH, "--global-batch", global_batch)
    if "shard" in fixed and base.shard > 1 and base.sharding != "hsdp":
        problems.append(
            f"--base has shard={base.shard}, which is of sharding=hsdp only; add sharding=hsdp, or leave shard out."
        )
    if problems:
        raise ConfigError(problems)
    return global_batch


def _contradiction(
    base: Plan, fixed: frozenset[str], factors: Sequence[str], option: str, asked: int
) -> Iterator[str]:
    """What is wrong where the factors that are fixed cannot multiply to what is asked."""
    named = [name for name in factors if name in fixed]
    product = math.prod(getattr(base, name) for name in named)
    words = " ".join(f"{name}={getattr(base, name)}" for name in named)
    if len(named) == len(factors):
        if product != asked:
            yield f"{option} is {asked}, but --base fixes {product} by {words}; change one of them."
    elif asked % product:
        yield f"{option} is {asked}, which {words} of --base ({product}) does not divide; change one of them."
