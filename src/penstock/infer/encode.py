"""`penstock.Embedder` and `penstock.Classifier`: vectors and classes of texts, and classes of images.

Texts are batched by length, so that the texts of a batch are nearly equally long, and the remaining padding is dropped
everywhere except in attention. Results are in the order of the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from penstock.boundary.files import Unreadable, read_bytes, shown
from penstock.config.formats import Weights
from penstock.config.graph import Input, PatchInput, TokenInput, VectorHead
from penstock.config.plan import Plan
from penstock.data.text.tokenizers import Tokenizer
from penstock.errors import ConfigError, DataError
from penstock.infer.load import Loaded, loaded
from penstock.infer.ranks import from_all_ranks, own_texts, together
from penstock.infer.text import needed
from penstock.models.anatomy import set_switch
from penstock.models.inputs import mean_of
from penstock.models.model import Model
from penstock.parallel import ALONE, ParallelDims, local_device
from penstock.parallel.hosts import attend

_CROP = 0.875
"""Share of an image's sides that the centre crop keeps, as in evaluation."""
_MOST_PIXELS = 178_956_970
_MOST_BYTES = 256 << 20


class _Texts:
    """An encoder, its tokenizer, and batches by length; embedding and classifying texts use it."""

    def __init__(
        self, opened: Loaded, batch: int, run: Callable[..., Tensor], dims: ParallelDims = ALONE,
        most: int | None = None,
    ) -> None:  # fmt: skip
        """`run` is the model, or the part of it to run, for texts of at most `most` tokens; None: the maximum of its
        first run."""
        assert isinstance(opened.model, Model)
        self.model, self.tokenizer, self.batch, self.run = opened.model, opened.tokenizer, batch, run
        self.dims, self.most = dims, most or opened.model.graph.runs[0].max_tokens
        set_switch(self.model, "padding", "remove")

    def row(self, text: Any) -> tuple[list[int], int]:
        """Token numbers of a text, a pair or token numbers, truncated to the model's length, and where a pair's second
        text begins."""
        if not isinstance(text, str) and not (isinstance(text, tuple) and isinstance(text[0], str)):
            ids = list(text)[: self.most]
            return ids, len(ids)
        tokenizer = needed(self.tokenizer)
        parts = [part.tolist() for part in tokenizer.encode([text] if isinstance(text, str) else list(text))]
        frame = tokenizer.frame(len(parts))
        room = self.most - frame.tokens
        while sum(map(len, parts)) > room:
            longest = max(parts, key=len)
            del longest[max(room // len(parts), len(longest) - (sum(map(len, parts)) - room)) :]
        ids = [*frame.before, *parts[0], *frame.between]
        second = len(ids) if len(parts) > 1 else len(ids) + len(frame.behind)
        return [*ids, *(parts[1] if len(parts) > 1 else []), *frame.behind], second

    def compute(self, texts: Sequence[Any], finish: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
        """`finish(outputs, lengths)` for all texts in order; lengths are None without padding. Ranks split the
        texts."""
        rows = [self.row(text) for text in texts]
        if not rows:
            raise ConfigError("There are no texts; give at least one.")
        if any(not ids for ids, _ in rows):
            raise ConfigError("A text has no tokens; write something.")
        here = self._computed(rows[own_texts(len(rows), self.dims)], finish)
        attend(self.model)
        return torch.cat([part.to(here.device) for part in from_all_ranks([here], self.dims) if len(part)])

    def _computed(
        self, rows: list[tuple[list[int], int]], finish: Callable[[Tensor, Tensor | None], Tensor]
    ) -> Tensor:
        device = next(self.model.parameters()).device
        if not rows:  # on a rank without texts
            return torch.empty(0, device=device)
        order = sorted(range(len(rows)), key=lambda number: len(rows[number][0]))
        parts = []
        for begin in range(0, len(order), self.batch):
            ids, seconds = zip(*(rows[number] for number in order[begin : begin + self.batch]))
            tokens = pad_sequence([torch.tensor(row) for row in ids], batch_first=True)
            sizes = torch.tensor([len(row) for row in ids])
            places, kinds = torch.arange(tokens.shape[1]), None
            # Without padding there is no mask.
            lengths = sizes.to(device) if int(sizes.min()) < len(places) else None
            if self.model.graph.inputs_of(TokenInput)[0].segments > 1:
                in_second = (places >= torch.tensor(seconds)[:, None]) & (places < sizes[:, None])
                kinds = in_second.long().to(device)
            with torch.inference_mode():
                parts.append(finish(self.run(tokens.to(device), lengths, kinds), lengths))
        return torch.cat(parts)[torch.tensor(order).argsort().to(device)]


class Embedder:
    """Vectors of texts, by an encoder: one of ours, or a folder of transformers with BERT. A model of images and texts
    returns vectors of both, always of length 1.

    A text's vector is the mean of its tokens' features, or its first token's where the folder's `1_Pooling` says so.

    With `dp` in the Plan, that many ranks make the same calls, split the texts and get all vectors; with `ep`, each
    rank hosts some experts of a mixture. Ranks start and end as in `penstock.Generator`.
    """

    def __init__(
        self, model: str | Path | Model, plan: Plan | None = None, *, weights: Weights = "auto",
        tokenizer: Tokenizer | None = None, batch: int = 32, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        """Raises ConfigError for a model that is not an encoder, and for a Plan with `tp`, `pp` or `cp`."""
        plan = plan or Plan()
        self.dims = ALONE
        with ExitStack() as joining:
            if plan.gpus > 1 and plan.gpus == plan.dp:
                device = local_device(torch.device(device))
                self.dims = joining.enter_context(together(plan, device, weights=weights))
            opened = loaded(
                model, plan, weights=weights, tokenizer=tokenizer, device=device, dims=self.dims, exact_outputs=True
            )  # fmt: skip
            graph, self.batch = opened.model.graph, batch
            head = _vectors(opened.model, TokenInput)
            if head is None and (graph.vision or graph.writer is not None):
                raise ConfigError(
                    f"The model, {graph.form}, does not embed texts; give an encoder such as bert-base, or a "
                    "model of images and texts such as multimodal-tiny."
                )
            self.model, self.first, self._made = opened.model, opened.pooled_first, head is not None
            self.white = opened.white
            most, run = head or (None, opened.model.features)
            self._texts = _Texts(opened, batch, run, self.dims, most)
            self._joined = joining.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: Any) -> None:
        self._joined.__exit__(*problem)

    def embed(self, texts: Sequence[str | Sequence[int]], *, normalize: bool = True) -> Tensor:
        """Vectors (texts, D) in fp32 on the model's device; of length 1 unless `normalize` is false."""

        def finish(features: Tensor, lengths: Tensor | None) -> Tensor:
            if self._made:
                return features
            vectors = features[:, 0].float() if self.first else mean_of(features.float(), lengths)
            return F.normalize(vectors, dim=1) if normalize else vectors

        return self._texts.compute(texts, finish)

    def embed_images(self, paths: Sequence[str | Path]) -> Tensor:
        """Vectors (images, E) of length 1 of images in files, in the same space as the vectors of texts. Raises
        ConfigError for a model without such vectors, DataError for a file that cannot be read."""
        head = _vectors(self.model, PatchInput)
        if head is None:
            raise ConfigError("The model does not embed images; give a model of images and texts.")
        return _over_images(self.model, paths, self.batch, head[1], white=self.white)


def _vectors(model: Any, kind: type[Input]) -> tuple[int, Callable[..., Tensor]] | None:
    """For inputs of a kind with a vector head: the maximum number of tokens of their run, and a function that returns
    vectors of length 1, (B, E). None without such a head."""
    runs = {head: model.graph.run(head.run) for head in model.graph.heads_of(VectorHead)}
    inputs = {head: model.graph.input_of(run) for head, run in runs.items()}
    head = next((head for head, one in inputs.items() if isinstance(one, kind)), None)
    if head is None:
        return None

    def vectors(values: Tensor, lengths: Tensor | None = None, segments: None = None) -> Tensor:
        more = {} if lengths is None else {"lengths": lengths}
        outputs: Tensor = model(**{inputs[head].name: values}, **more)[head.name]
        return F.normalize(outputs[:, : head.features], dim=1)

    return runs[head].max_tokens, vectors


@dataclass(frozen=True, slots=True)
class Classified:
    """The result of a classifier for one input."""

    label: str
    """Name of the likeliest class, or its number."""
    probability: float
    probabilities: tuple[float, ...]


class Classifier:
    """Classes of texts or pairs of texts, by an encoder with a classification head; or of images, by a ViT. Raises
    ConfigError for a model without classes."""

    def __init__(
        self, model: str | Path | Model, plan: Plan | None = None, *, weights: Weights = "auto",
        tokenizer: Tokenizer | None = None, classes: Sequence[str] = (), batch: int = 32,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        opened = loaded(
            model, plan or Plan(), weights=weights, tokenizer=tokenizer, device=device, classifies=True
        )
        self.model, self.batch, self.white = opened.model, batch, opened.white
        self.classes = tuple(classes) or opened.classes
        self._texts: _Texts | None = None
        if opened.model.graph.classes is None:
            raise ConfigError("The model has no classes; give a ViT, or an encoder with a head for them.")
        if not opened.model.graph.vision:
            self._texts = _Texts(opened, batch, opened.model)

    @property
    def reads_images(self) -> bool:
        """Whether inputs are images."""
        return self._texts is None

    def classify(self, inputs: Sequence[Any]) -> list[Classified]:
        """Classify texts, pairs of texts, or token numbers with an encoder; with a ViT, images as paths or file
        contents."""
        if self._texts is not None:
            logits = self._texts.compute(inputs, lambda outputs, _: outputs.float())
        else:
            logits = _over_images(
                self.model, inputs, self.batch, self.model, crop_share=_CROP, white=self.white
            ).float()
        shares = torch.softmax(logits, dim=-1).tolist()
        return [self._classified(row) for row in shares]

    def _classified(self, shares: list[float]) -> Classified:
        best = int(np.argmax(shares))
        label = self.classes[best] if len(self.classes) == len(shares) else str(best)
        return Classified(label, shares[best], tuple(shares))


def _over_images(
    model: Model, paths: Sequence[str | Path | bytes], batch: int, compute: Callable[[Tensor], Tensor],
    **how: Any,
) -> Tensor:  # fmt: skip
    """`compute` for all images in files, a batch at a time; `how` has the arguments of `read_images`. Raises
    ConfigError if there are none."""
    if not paths:
        raise ConfigError("There are no images; give at least one.")
    outputs = []
    for begin in range(0, len(paths), batch):
        images = read_images(model, paths[begin : begin + batch], **how)
        with torch.inference_mode():
            outputs.append(compute(images))
    return torch.cat(outputs)


def read_images(
    model: Model, paths: Sequence[str | Path | bytes], *, crop_share: float = 1.0, white: float | None = None
) -> Tensor:
    """The centre crops of images, from paths or file contents, as inputs of a model: (B, C, S, S) in its dtype and on
    its device. Raises DataError for an image that cannot be read."""
    from penstock.data.augment import center_batch
    from penstock.data.decode import decode

    image_input = model.graph.images
    size, first = round(image_input.image_size / crop_share), next(model.parameters())
    pixels = np.empty((len(paths), size, size, image_input.channels), np.uint8)
    for place, path in enumerate(paths):
        raw = path if isinstance(path, bytes) else read_bytes(path, "The image", limit=_MOST_BYTES)
        try:
            decode(raw, pixels[place], max_pixels=_MOST_PIXELS, white=white)
        except Unreadable as error:
            name = f"Image {place + 1}" if isinstance(path, bytes) else f"The image {shown(path)}"
            raise DataError(f"{name} cannot be read: {error}") from error
    images = torch.from_numpy(pixels).to(first.device)
    return center_batch(images, image_size=image_input.image_size, crop_share=crop_share).to(first.dtype)
