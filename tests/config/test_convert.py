"""Text and typed values become field values, or say in words why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from penstock.cli.plan_config import PlanConfig
from penstock.cli.scale import ScaleConfig
from penstock.config.convert import BadValue, check_fields, convert, nearest
from penstock.config.kinds import dataclasses_of, describe, field_types, places_of
from penstock.config.machine import Machine
from penstock.config.run import RunConfig
from penstock.data.packing import Packing
from penstock.ladder.settings import LadderConfig
from penstock.launch.settings import LaunchSettings
from penstock.planner.serve import Serving


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("1e-3", float, 0.001),
        ("3", float, 3.0),
        ("1e4", int, 10_000),
        ("-2", int, -2),
        ("9007199254740993", int, 9007199254740993),  # one more than a float can hold
        ("yes", bool, True),
        ("Off", bool, False),
        ("none", float | None, None),
        ("None", str | None, None),
        ("2.5", float | None, 2.5),
        ("b", Literal["a", "b"], "b"),
        ("1, 2,3", tuple[int, ...], (1, 2, 3)),
        ("none", tuple[int, ...], ()),
    ],
)
def test_text_becomes_the_value(text: str, kind: Any, value: object) -> None:
    converted = convert(text, kind, text=True)
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("1.5", int), ("inf", int), ("maybe", bool), ("abc", float), ("none", float), ("c", Literal["a", "b"]),
        (True, int), (1, bool), (1, str), ([1, "x"], tuple[int, ...]), ({"a": "x"}, dict[str, float]),
        (3, dict[str, float]),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(value: object, kind: Any) -> None:
    with pytest.raises(BadValue, match="must be"):
        convert(value, kind, text=isinstance(value, str))


def test_without_text_a_string_is_a_string_and_types_have_words() -> None:
    with pytest.raises(BadValue):
        convert("3", int)
    assert convert("3", str) == "3"
    assert describe(Literal["a", "b", "c"]) == "'a', 'b' or 'c'"
    assert describe(float | None) == "a number or none"
    assert describe(tuple[int, ...]) == "a list, each item a whole number"


def test_what_a_name_is_the_beginning_of_is_nearest() -> None:
    """Of `a100` difflib finds v100 the most similar, which is another chip."""
    assert nearest("a100", ["v100", "a100-40g", "a100-80g"]) == " Did you mean 'a100-40g' or 'a100-80g'?"
    assert nearest("v", ["v100", "v200"]) == "", "a letter is no beginning"
    assert nearest("lrr", ["lr", "seed"]) == " Did you mean 'lr'?"
    assert nearest("zzzz", ["lr", "seed"]) == ""
    assert nearest("gpt-1", ["gpt-1t", "gpt-1.7b", "gpt-18b", "gpt-145b"]) == " Did you mean 'gpt-1t'?"


def test_fields_are_found_where_they_are() -> None:
    assert list(places_of("lr", RunConfig)) == ["recipe.lr"]
    assert list(places_of("width", RunConfig)) == ["model.width"]
    assert list(places_of("seed", RunConfig)) == ["seed"]


@dataclass(frozen=True)
class _Sample:
    count: int = 1
    rate: float = 1.0
    kind: Literal["a", "b"] = "a"
    maybe: float | None = None
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    "wrong",
    [{"count": 1.0}, {"count": True}, {"kind": "c"}, {"maybe": "none"}, {"names": ["a"]}, {"rate": "1"}],
)
def test_fields_are_held_to_their_types(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    (problem,) = check_fields(_Sample(**wrong), "sample")
    assert problem.startswith(f"sample.{name} is ")


def test_a_whole_number_may_stand_for_a_float() -> None:
    assert check_fields(_Sample(rate=2, maybe=3), "sample") == []


@pytest.mark.parametrize(
    "cls", [RunConfig, LadderConfig, ScaleConfig, PlanConfig, Machine, Packing, LaunchSettings, Serving]
)
def test_every_number_of_a_configuration_has_a_range(cls: type) -> None:
    def bare(kind: Any, where: str) -> Iterator[str]:
        for arm in dataclasses_of(kind):
            for name, inner in field_types(arm).items():
                yield from bare(inner, f"{where}.{name}")
        if kind in (int, float):
            yield where
        elif get_origin(kind) not in (Annotated, Literal):
            for part in get_args(kind):
                if not dataclasses_of(part) or get_origin(kind) is tuple:
                    yield from bare(part, where)

    assert list(bare(cls, cls.__name__)) == []
