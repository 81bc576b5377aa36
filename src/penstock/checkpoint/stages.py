"""One document of what ranks hold that have different parts of a model, and of it what one of them holds.

Ranks of a pipeline hold other parameters each, under the names of the whole model. Nothing else of a document differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from penstock.checkpoint.coordinator import Coordinator


def together(document: Mapping[str, Any], coordinator: Coordinator) -> dict[str, Any]:
    """The document of all ranks, on each of them. One that several share is sent once."""
    text = json.dumps(document, sort_keys=True).encode()
    digests = coordinator.all(lambda: hashlib.sha256(text).hexdigest())
    if len(set(digests)) == 1:
        return dict(document)
    first = digests.index(digests[coordinator.rank]) == coordinator.rank
    every = coordinator.all(lambda: dict(document) if first else None)
    return united([one for one in every if one is not None])


def united(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Names of weights and an optimizer's state by name of all documents; of the rest, the first one's."""
    found: dict[str, Any] = {}
    for document in documents:
        for key, value in document.items():
            if key == "param_groups":
                found[key] = _groups(found.get(key, []), value)
            elif isinstance(value, Mapping):
                found[key] = united([found.get(key, {}), value])
            elif isinstance(value, list) and document is not documents[0] and _are_names(value):
                found[key] = list(dict.fromkeys([*found.get(key, []), *value]))
            else:
                found.setdefault(key, value)
    return found


def _are_names(value: list[Any]) -> bool:
    return all(isinstance(item, str) for item in value)


def _groups(known: Sequence[Mapping[str, Any]], more: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of parameters of the same settings as one."""
    groups = [dict(group) for group in known]
    for group in more:
        settings = {key: value for key, value in group.items() if key != "params"}
        for other in groups:
            if {key: value for key, value in other.items() if key != "params"} == settings:
                other["params"] = list(dict.fromkeys([*other["params"], *group["params"]]))
                break
        else:
            groups.append(dict(group))
    return groups


def only(document: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The weights of these names in a document, and the optimizer's state of these parameters."""

    def of(tree: Any) -> Any:
        if not isinstance(tree, Mapping) or "param_groups" not in tree:
            return tree
        groups = [
            {**group, "params": [name for name in group["params"] if name in names]}
            for group in tree["param_groups"]
        ]
        state = {name: entry for name, entry in tree["state"].items() if name in names}
        return {**tree, "state": state, "param_groups": [group for group in groups if group["params"]]}

    weights = {group: [name for name in held if name in names] for group, held in document["weights"].items()}
    return {"weights": weights, "state": {name: of(tree) for name, tree in document["state"].items()}}
