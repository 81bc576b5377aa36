"""`penstock.Captioner`: captions of images and translations of texts, by one multimodal model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from penstock.boundary.files import quoted
from penstock.boundary.hub import local_weights
from penstock.config.decoding import Decoding
from penstock.config.graph import PatchInput, TokenInput
from penstock.config.plan import Plan
from penstock.decode.beam import search
from penstock.decode.texts import Prompts, eagerly
from penstock.errors import ConfigError
from penstock.infer.encode import read_images
from penstock.infer.load import loaded
from penstock.infer.text import needed
from penstock.models.convert.pretrained import read_config
from penstock.models.model import Model
from penstock.tasks.text import padded

if TYPE_CHECKING:
    from penstock.data.text.tokenizers import Tokenizer

T = TypeVar("T")
_OTHER_WAYS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "best", "speculate", "stop",
)  # fmt: skip
"""Fields of `Decoding` that make no sense for the single likeliest text."""


def writes_of_either(folder: str | Path) -> bool:
    """Whether a folder holds a model whose decoder attends to one of several sources."""
    return any(len(run.memories) > 1 for run in read_config(local_weights(folder)).graph.written)


class Captioner:
    """Captions of images and translations of texts, by a model whose decoder attends to either: by the likeliest token
    at each step, or with `beams` by beam search."""

    def __init__(
        self, model: str | Path | Model, plan: Plan | None = None, *, tokenizer: Tokenizer | None = None,
        batch: int = 32, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        """Raises ConfigError for a model that does not caption images."""
        opened = loaded(model, plan or Plan(), weights="plain", tokenizer=tokenizer, device=device)
        graph = opened.model.graph
        self._inputs = {type(item): item for item in map(graph.input_of, graph.remembered)}
        if PatchInput not in self._inputs or TokenInput not in self._inputs:
            raise ConfigError(
                "The model does not write captions; give a model of images and texts, such as multimodal-tiny."
            )
        self.model, self.tokenizer, self.batch = opened.model, needed(opened.tokenizer), batch
        self.start, self.ends, self.languages = opened.start, opened.ends, opened.languages
        self.white = opened.white

    def caption(
        self, paths: Sequence[str | Path], language: str, decoding: Decoding | None = None, **settings: Any
    ) -> list[str]:
        """A caption of each image, in a language by its name in training. `settings` are fields of `Decoding`. Raises
        DataError for a file that cannot be read, ConfigError for a language that training did not have, and for
        settings that make no sense for the single likeliest text."""
        name, how = self._inputs[PatchInput].name, replace(decoding or Decoding(), **settings)
        return self._written(
            paths, lambda some: {name: read_images(self.model, some, white=self.white)}, language, how
        )

    def translate(
        self, texts: Sequence[str], language: str, decoding: Decoding | None = None, **settings: Any
    ) -> list[str]:
        """A translation of each text; language, settings and errors are as in `caption`."""
        return self._written(texts, self._read, language, replace(decoding or Decoding(), **settings))

    def _read(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """The model's arguments for some texts."""
        words = self._inputs[TokenInput]
        tokens, lengths = padded(self.tokenizer.framed(texts), 0)
        if tokens.shape[1] > words.length:
            raise ConfigError(
                f"A text has {tokens.shape[1]} tokens, but the model reads {words.length}; shorten it."
            )
        return {words.name: torch.from_numpy(tokens), "lengths": torch.from_numpy(lengths)}

    def _written(
        self, inputs: Sequence[T], read: Callable[[Sequence[T]], dict[str, Tensor]], language: str,
        decoding: Decoding,
    ) -> list[str]:  # fmt: skip
        """The text written for each input, a batch at a time; `read` turns inputs into the model's arguments."""
        from penstock.data.captions import beginning

        if others := [name for name in _OTHER_WAYS if getattr(decoding, name) != getattr(Decoding(), name)]:
            raise ConfigError(
                f"Captions and translations are the likeliest texts; leave decoding.{others[0]} out."
            )
        if self.languages and language not in self.languages:
            raise ConfigError(
                f"{quoted(language)} is not a language of this model. Its languages are {', '.join(self.languages)}."
            )
        device = next(self.model.parameters()).device
        opened: Any = self.tokenizer.encode_target([beginning(language)])[0].tolist()
        ids = torch.tensor([[self.start, *opened]], device=device)
        room = self.model.graph.written[-1].max_tokens - ids.shape[1]
        if room < 1:
            raise ConfigError(
                f"The name of the language {language[:20]!r} leaves no room for a text; shorten it."
            )
        decoding = replace(decoding, max_tokens=min(room, decoding.max_tokens or room))
        if decoding.beams == 1:
            decoding = replace(decoding, early_stopping="full")
        texts: list[str] = []
        for begin in range(0, len(inputs), self.batch):
            some = inputs[begin : begin + self.batch]
            values = {name: value.to(device) for name, value in read(some).items()}
            lengths = torch.full((len(some),), ids.shape[1], device=device)
            prompts = Prompts(ids.repeat(len(some), 1), lengths, even=True, values=values)
            with eagerly():
                best = search(self.model, prompts, decoding, ends=self.ends)
            texts += self.tokenizer.decode_rows(best.tokens[:, 0].tolist())
        return texts
