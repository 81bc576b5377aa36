"""Tasks that models are trained for: one row each, which names its class in `penstock.tasks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple


class TaskRow(NamedTuple):
    """A task's form and tag, available without importing its class."""

    place: str
    """Its class, or the task itself, as a module of `penstock.tasks` and a name in it; empty for one of the user's."""
    form: str
    """Forms of the graphs that it trains, separated by `or`."""
    tag: str = ""
    """The hub's word for it."""

    @property
    def forms(self) -> list[str]:
        """The forms, one by one."""
        return self.form.split(" or ")


TASKS = {
    "images": TaskRow("image_classification.classification_loss", "images", "image-classification"),
    "denoise": TaskRow("denoise.Denoise", "noisy images"),
    "next_token": TaskRow("next_token.NextToken", "causal tokens", "text-generation"),
    "chat": TaskRow("chat.Chat", "causal tokens", "text-generation"),
    "preferences": TaskRow("preferences.Preferences", "causal tokens", "text-generation"),
    "masked_words": TaskRow("masked_words.MaskedWords", "tokens", "fill-mask"),
    "sentences": TaskRow("sentences.Sentences", "tokens", "text-classification"),
    "pairs": TaskRow("sentences.Pairs", "tokens", "text-classification"),
    "span_corruption": TaskRow("span_corruption.SpanCorruption", "causal tokens and tokens", "text2text-generation"),
    "translation": TaskRow("translation.Translation", "causal tokens and tokens", "translation"),
    "embedding": TaskRow("embedding.Embedding", "tokens", "sentence-similarity"),
    "captions": TaskRow("captions.Captioning", "causal images and tokens and tokens with 3 heads", "image-to-text"),
    "universal": TaskRow(
        "universal.Universal", "causal tokens with 2 heads or causal tokens with 3 heads or tokens with 2 heads"
    ),
}  # fmt: skip
"""The tasks by name. The first task with a form is the default for models of that form."""
if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal["auto", *TASKS]
