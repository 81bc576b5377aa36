"""`penstock.Captioner`: texts that a model of images and texts writes of either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from penstock.config.graph import PatchInput, TokenInput
from penstock.config.plan import Plan
from penstock.decode.choose import NOTHING
from penstock.decode.texts import Prompts
from penstock.decode.write import write
from penstock.errors import ConfigError
from penstock.infer.encode import read_images
from penstock.infer.load import loaded
from penstock.infer.text import needed
from penstock.models.convert.hub import local_weights
from penstock.models.convert.pretrained import read_config
from penstock.models.model import Model
from penstock.tasks.text import padded

if TYPE_CHECKING:
    from penstock.data.text.tokenizers import Tokenizer

T = TypeVar("T")


def writes_of_either(folder: str | Path) -> bool:
    """Whether a folder holds a model whose writer sees one of several memories."""
    return any(len(run.memories) > 1 for run in read_config(local_weights(folder)).graph.written)


class Captioner:
    """Captions of images, and translations of texts, the likeliest token each time, by a model whose writer sees
    either."""

    def __init__(
        self,
        model: str | Path | Model,
        plan: Plan | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        batch: int = 32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises ConfigError for a model that does not write of images."""
        opened = loaded(model, plan or Plan(), weights="plain", tokenizer=tokenizer, device=device)
        graph = opened.model.graph
        memories = {name for run in graph.written for name in run.memories}
        self._inputs = {
            type(one): one for run in graph.runs if run.name in memories for one in (graph.input_of(run),)
        }
        if PatchInput not in self._inputs or TokenInput not in self._inputs:
            raise ConfigError(
                "The model writes no captions; give one of images and texts, such as multimodal-tiny."
            )
        self.model, self.tokenizer, self.batch = opened.model, needed(opened.tokenizer), batch
        self.start, self.ends = opened.start, opened.ends

    def caption(
        self, paths: Sequence[str | Path], language: str, *, max_tokens: int | None = None
    ) -> list[str]:
        """A caption of each image, in a language by the name that training gave it. Raises DataError for a file that
        cannot be read."""
        name = self._inputs[PatchInput].name
        files = [Path(path) for path in paths]
        return self._written(files, lambda some: {name: read_images(self.model, some)}, language, max_tokens)

    def translate(self, texts: Sequence[str], language: str, *, max_tokens: int | None = None) -> list[str]:
        """Each text in another language."""
        return self._written(texts, self._read, language, max_tokens)

    def _read(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """The model's arguments of some texts."""
        frame, one = self.tokenizer.frame(), self._inputs[TokenInput]
        rows = [[*frame.before, *text, *frame.behind] for text in self.tokenizer.encode(texts)]
        tokens, lengths = padded(rows, 0)
        if tokens.shape[1] > one.length:
            raise ConfigError(
                f"A text has {tokens.shape[1]} tokens, but the model reads {one.length}; shorten it."
            )
        return {one.name: torch.from_numpy(tokens), "lengths": torch.from_numpy(lengths)}

    def _written(
        self,
        inputs: Sequence[T],
        read: Callable[[Sequence[T]], dict[str, Tensor]],
        language: str,
        max_tokens: int | None,
    ) -> list[str]:
        """Texts that are written of the inputs, of which `read` makes the model's arguments, a batch at a time."""
        from penstock.data.captions import beginning

        device = next(self.model.parameters()).device
        opened: Any = self.tokenizer.encode_target([beginning(language)])[0].tolist()
        ids = torch.tensor([[self.start, *opened]], device=device)
        room = self.model.graph.written[-1].most - ids.shape[1]
        if room < 1:
            raise ConfigError(
                f"The name of the language {language[:20]!r} leaves no room for a text; shorten it."
            )
        texts: list[str] = []
        for begin in range(0, len(inputs), self.batch):
            some = inputs[begin : begin + self.batch]
            values = {name: value.to(device) for name, value in read(some).items()}
            lengths = torch.full((len(some),), ids.shape[1], device=device)
            prompts = Prompts(ids.repeat(len(some), 1), lengths, even=True, values=values)
            tokens = write(self.model, prompts, min(room, max_tokens or room), ends=self.ends).tolist()
            texts += [self.tokenizer.decode([one for one in row if one != NOTHING]) for row in tokens]
        return texts
