"""Labels of texts, which choose the experts of a model: a prompt begins with its label, or the caller passes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.boundary.files import quoted
from penstock.config.graph import Graph
from penstock.data.toy.words import label_of
from penstock.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class TextLabels:
    """The labels that texts of one model can have."""

    names: tuple[str, ...] = ()
    """Names in the order of their numbers; empty for a model that chooses experts itself, or has none."""
    in_prompts: bool = False
    """Whether prompts begin with their label, as `en>sw: Germany` does."""

    def numbers(
        self, prompts: Sequence[str | Sequence[int]], label: str | Sequence[str] | None = None
    ) -> list[int | None]:
        """The number of each prompt's label: from `label`, one for all or one for each, else from the prompt itself.
        None for a model without labels. Raises ConfigError, listing all labels, if one is missing or unknown."""
        if label is not None and not self.names:
            raise ConfigError("Labels do not choose this model's experts; leave label out.")
        each: Sequence[str | None] = (
            [label] * len(prompts) if label is None or isinstance(label, str) else label
        )
        if len(each) != len(prompts):
            raise ConfigError(
                f"There are {len(each)} labels for {len(prompts)} prompts; give one for each, or one for all."
            )
        return [self._number(*pair) if self.names else None for pair in zip(prompts, each, strict=True)]

    def among(self, only: Sequence[str]) -> list[int]:
        """The numbers of some labels, in ascending order. Raises ConfigError for unknown labels, and for a model whose
        experts are not chosen by labels."""
        return sorted({number for number in self.numbers([()] * len(only), list(only)) if number is not None})

    def _number(self, prompt: str | Sequence[int], label: str | None) -> int:
        if label is None and self.in_prompts and isinstance(prompt, str):
            label = label_of(prompt)
        if label is None and len(self.names) == 1:
            return 0
        if label in self.names:
            return self.names.index(label)
        listed = ", ".join(self.names)
        if label is not None:
            raise ConfigError(f"{quoted(label)} is not a label of this model. Its labels are {listed}.")
        begin = f", or begin the prompt as in {self.names[0]}>{self.names[-1]}: …" if self.in_prompts else ""
        raise ConfigError(
            f"Labels choose the experts of this model, and a prompt has none. Give one as label{begin}. Its labels are "
            f"{listed}."
        )


def labels_of(graph: Graph, settings: Mapping[str, Any]) -> TextLabels:
    """The labels of a model, from the `settings` in its folder's config.json; without names there, numbers serve as
    names. Raises CheckpointError for names that do not fit the model's number of labels."""
    stacks = [run.stack for run in graph.runs if run.stack.experts and run.stack.router == "given"]
    if not stacks:
        return TextLabels()
    count = min(one.labels or (one.router_groups if one.router_groups > 1 else one.experts) for one in stacks)
    names = settings.get("labels", list(map(str, range(count))))
    distinct = {one for one in names if isinstance(one, str)} if isinstance(names, list) else set()
    if not isinstance(names, list) or not len(distinct) == len(names) == count:
        raise CheckpointError(
            f"labels in config.json must be a list with the names of the model's {count} labels, all different. Export "
            "the run again."
        )
    return TextLabels(tuple(names), settings.get("labels_in_prompts") is True)
