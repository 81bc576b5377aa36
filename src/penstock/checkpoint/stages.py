"""One document for ranks with different parts of a model: merged for saving, reduced to a rank's part after loading.

Ranks of a pipeline hold different parameters, named as in the whole model. All else in their documents is the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from penstock.checkpoint.coordinator import Coordinator


def merge_documents(document: Mapping[str, Any], coordinator: Coordinator) -> dict[str, Any]:
    """All ranks' documents merged, on every rank. A document that several ranks have is sent once."""
    text = json.dumps(document, sort_keys=True).encode()
    digests = coordinator.all(lambda: hashlib.sha256(text).hexdigest())
    if len(set(digests)) == 1:
        return dict(document)
    first = digests.index(digests[coordinator.rank]) == coordinator.rank
    every = coordinator.all(lambda: dict(document) if first else None)
    return _merged([shared for shared in every if shared is not None])


def _merged(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All documents merged: names of weights and optimizer state by name from each, the rest from the first."""
    merged: dict[str, Any] = {}
    for document in documents:
        for key, value in document.items():
            if key == "param_groups":
                merged[key] = _groups([*merged.get(key, []), *value])
            elif isinstance(value, Mapping):
                merged[key] = _merged([merged.get(key, {}), value])
            elif (
                isinstance(value, list)
                and document is not documents[0]
                and all(isinstance(item, str) for item in value)
            ):
                merged[key] = list(dict.fromkeys([*merged.get(key, []), *value]))
            else:
                merged.setdefault(key, value)
    return merged


def _groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge groups of parameters that have the same settings."""
    merged: dict[str, dict[str, Any]] = {}
    for group in groups:
        settings = json.dumps({**group, "params": None}, sort_keys=True)
        one = merged.setdefault(settings, {**group, "params": []})
        one["params"] = list(dict.fromkeys([*one["params"], *group["params"]]))
    return list(merged.values())


def restricted(document: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The part of a document with the weights of these names and the optimizer's state of them."""

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
