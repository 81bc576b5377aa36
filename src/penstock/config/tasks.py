"""Tasks that models are trained for: one row each, beside its class in `penstock.tasks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple


class TaskRow(NamedTuple):
    """A task's form and tag, available without importing its class."""

    form: str
    """Forms of the graphs that it trains, separated by `or`."""
    tag: str = ""
    """The hub's word for it."""

    @property
    def forms(self) -> list[str]:
        """The forms, one by one."""
        return self.form.split(" or ")


TASKS = {
    "images": TaskRow("images", "image-classification"),
    "denoise": TaskRow("noisy images"),
    "next_token": TaskRow("causal tokens", "text-generation"),
    "chat": TaskRow("causal tokens", "text-generation"),
    "preferences": TaskRow("causal tokens", "text-generation"),
    "masked_words": TaskRow("tokens", "fill-mask"),
    "sentences": TaskRow("tokens", "text-classification"),
    "pairs": TaskRow("tokens", "text-classification"),
    "span_corruption": TaskRow("causal tokens and tokens", "text2text-generation"),
    "translation": TaskRow("causal tokens and tokens", "translation"),
    "embedding": TaskRow("tokens", "sentence-similarity"),
    "captions": TaskRow("causal images and tokens and tokens with 3 heads", "image-to-text"),
    "universal": TaskRow("causal tokens with 2 heads or causal tokens with 3 heads or tokens with 2 heads"),
}
"""The tasks by name. The first task with a form is the default for models of that form."""
if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal["auto", *TASKS]
