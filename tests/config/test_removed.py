"""What earlier versions had is refused by name, with what to use instead; what says the same as its absence is read."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.load import from_dict, load
from penstock.config.plan import Plan
from penstock.config.removed import REMOVED, REMOVED_VALUES, without_removed
from penstock.config.run import RunConfig
from penstock.errors import ConfigError


@pytest.mark.parametrize("key", [key for key in REMOVED if key.startswith(("Plan", "Recipe"))])
def test_a_removed_setting_is_refused_by_name_in_files_and_options(key: str) -> None:
    name = key[0].lower() + key[1:]
    section, _, field = name.partition(".")
    instead, same = REMOVED[key]
    for values in ({name: "something"}, {section: {field: "something"}}):
        with pytest.raises(ConfigError, match=rf"{name}=something was removed; ") as problem:
            load(RunConfig, overrides={"model": "vit-digits", **values})
        assert instead in str(problem.value)
    for value in same:
        stored: dict[str, Any] = {"model": {"family": "vit"}, section: {field: value}}
        assert from_dict(RunConfig, stored) == from_dict(RunConfig, {"model": {"family": "vit"}})
        stored[section][field] = "something"
        assert field not in without_removed(stored)[section]


@pytest.mark.parametrize("path", ["model.router", "model.decoder.router"])
@pytest.mark.parametrize("value", REMOVED_VALUES["Stack.router"])
def test_a_removed_router_is_refused_by_name(path: str, value: str) -> None:
    family = "encoder" if path == "model.router" else "seq2seq"
    with pytest.raises(ConfigError, match=rf"{path}={value} was removed; use softmax"):
        load(RunConfig, overrides={"model.family": family, path: value})


def test_a_plan_with_what_was_removed_is_refused_as_a_line_too() -> None:
    assert Plan.parse("precision=O2 master=copy") == Plan(precision="O2")
    with pytest.raises(
        ConfigError, match=r"plan\.master=remainder was removed; leave it out: precision=O2 keeps"
    ):
        Plan.parse("precision=O2 master=remainder")
