"""An optimizer's state by parameter name, so that it does not depend on the parameters' order or grouping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import CheckpointError

_OWN = ("params", "param_names")


def by_name(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's `state_dict()` with names in place of torch's numbers.

    The names are those in each group's `param_names`: `parameter_groups` puts them there, and so does torch where an
    optimizer is made of `named_parameters()`. Entries beside `state` and `param_groups` are kept as they are.

    Raises:
        ValueError: the names are missing, or two are the same.
    """
    groups: list[dict[str, Any]] = []
    called: dict[Any, str] = {}
    for group in state_dict["param_groups"]:
        names = list(group.get("param_names", ()))
        if len(names) != len(group["params"]):
            raise ValueError(
                f"A parameter group has {len(group['params'])} parameters and {len(names)} names; build it with "
                f"penstock.parameter_groups, or give the optimizer the model's named_parameters()."
            )
        called |= dict(zip(group["params"], names))
        groups.append({**{k: v for k, v in group.items() if k not in _OWN}, "params": names})
    if len(set(called.values())) != len(called):
        raise ValueError("Two parameters of the optimizer have one name.")
    state = {called[number]: entry for number, entry in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def by_index(stored: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `by_name`, for the `load_state_dict` of the optimizer whose `state_dict()` is `current`.

    Raises:
        CheckpointError: the stored state is of other parameters, or has different settings within one group.
    """
    home = {name: group for group in stored["param_groups"] for name in group["params"]}
    plain = by_name(current)
    names = [name for group in plain["param_groups"] for name in group["params"]]
    if set(names) != set(home):
        unknown, missing = sorted(set(home) - set(names)), sorted(set(names) - set(home))
        raise CheckpointError(
            f"The stored optimizer state is of another model: it lacks {missing[:3] or 'nothing'} and also has "
            f"{unknown[:3] or 'nothing'}. Use the model that it was saved with."
        )
    groups = []
    for group, named in zip(current["param_groups"], plain["param_groups"]):
        homes = [home[name] for name in named["params"]]
        settings = [{k: v for k, v in h.items() if k != "params"} for h in homes]
        if any(other != settings[0] for other in settings):
            raise CheckpointError(
                f"The stored optimizer groups parameters differently: {named['params'][0]} and others of its group "
                f"were trained with different settings. Use the recipe that it was saved with."
            )
        own = {key: group[key] for key in _OWN if key in group}
        groups.append({**(settings[0] if settings else group), **own})
    number = {
        name: i for g, n in zip(groups, plain["param_groups"]) for name, i in zip(n["params"], g["params"])
    }
    state = {number[name]: entry for name, entry in stored["state"].items()}
    return {**stored, "state": state, "param_groups": groups}
