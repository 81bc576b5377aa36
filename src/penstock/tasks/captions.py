"""Images and their names in one space, and captions and translations of either (Yu et al., TMLR 2022, "CoCa").

Shapes: B samples, L tokens of a name that is read, T of one that is written, E features of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.config.decoding import Decoding
from penstock.config.graph import PatchInput, TokenInput, VectorHead
from penstock.config.model import ModelConfig
from penstock.config.run import Augment, DataConfig
from penstock.data.captions import IMAGE, Captions, beginning, open_captions
from penstock.data.images import PrepareImages
from penstock.data.loader import HostBatch
from penstock.data.sampler import Stream
from penstock.data.source import Source, Split
from penstock.data.transform import load_function
from penstock.decode.beam import search
from penstock.decode.texts import Prompts, eagerly, sharded
from penstock.errors import ConfigError
from penstock.kernels.cross_entropy import IGNORED
from penstock.tasks.task import Fullness, Prepare
from penstock.tasks.text import (
    DRAWN,
    TextBatch,
    TextTask,
    first_samples,
    on_device,
    padded,
    rounded,
    shifted,
    tokenizer_of,
)  # fmt: skip

if TYPE_CHECKING:
    from penstock.data.text.tokenizers import Tokenizer

MOST = 1 << 22
"""Numbers of the vectors that an evaluation keeps: of larger splits, the first images and names are compared."""
SHOWN = 3


class Weights(NamedTuple):
    """The parts of the loss."""

    contrast: float
    words: float
    form: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionBatch(TextBatch):
    """Batch of images, names that are read, and names that are written."""

    concepts: Tensor
    """(B,) what each sample shows."""
    rows: NDArray[Any]
    """(B,) records of `penstock.data.captions.Captions.rows`, on the host."""
    beginnings: Tensor
    """(B,) tokens at the beginning of what is written that are given."""
    weights: Weights


class Captioning(TextTask):
    """Mean over samples of the contrast, half of finding each image's name among those of the batch and half the other
    way round, and of the loss of the name that is written, the sum over its tokens; each times its weight in the
    configuration of the model. Names in all languages of what an image shows are its own. With several ranks the batch
    is that of all, and gradients go back to each.

    A writer is given the language as the beginning of what it writes: `de: sieben`.

    Metrics are of a whole split. `image_to_text` and `text_to_image` are recall@1 among the names of a language and
    among images, the mean over languages; `unseen_words` the latter of names that training never saw; `captions` and
    `translations` the shares of names that are written exactly, `unseen_pairs` those of translations between languages
    between which nothing was translated. With a language behind it (`captions_de`), they are those of this language;
    with `_chance`, the recall of a guess, which few names of a language in a split make easy.
    """

    unit = "captions"
    compares = True
    augments = frozenset({field.name for field in fields(Augment)} - {"mixup", "cutmix"})
    shown = (
        "image→text {image_to_text:.1%} (chance {image_to_text_chance:.1%})",
        "text→image {text_to_image:.1%} (chance {text_to_image_chance:.1%})", "unseen words {unseen_words:.1%}",
        "captions {captions:.1%}", "translations {translations:.1%}", "unseen pairs {unseen_pairs:.1%}",
        "loss {loss:.4f}",
    )  # fmt: skip
    _names: _NameTokens
    """The names of the source that `prepare` makes batches of."""

    # -- data

    def open(self, data: DataConfig, model: ModelConfig, split: Split) -> Source:
        source = open_captions(data, split, channels=_images(model).channels)
        source.tokenizer = self.tokenizer(data)
        if data.transform is not None:
            source.transform = load_function(data.transform, "data.transform")
        return source

    def fit(self, model: ModelConfig, source: Source) -> ModelConfig:
        """The model with a vocabulary as large as the tokenizer's. Raises ConfigError where names are too long."""
        _NameTokens(cast(Captions, source), model)
        return self.fit_vocabulary(model, tokenizer_of(source))

    def prepare(
        self, source: Source, model: ModelConfig, *, augment: Augment | None = None, seed: int = 0
    ) -> Prepare:
        assert isinstance(source, Captions)
        self._names = _NameTokens(source, model)
        return PrepareCaptions(source, model, self._names, augment, seed)

    def blank(self, model: ModelConfig, device: torch.device) -> tuple[Any, ...]:
        images, one = _images(model), torch.zeros(1, 1, dtype=torch.int64, device=device)
        empty = torch.zeros(1, images.channels, images.image_size, images.image_size, device=device)
        target = one.expand(1, model.graph.inputs[2].length)
        return empty, one, target, one[0] + 1, None, None, 0.0, None, one[0]

    def fullness(self, source: Source, model: ModelConfig, batch: int) -> Fullness:
        assert isinstance(source, Captions)
        names, rows = _NameTokens(source, model), source.rows
        ids = Stream(len(source), 0).ids(0, DRAWN * batch)
        read = names.read_lengths[rows["read"][ids]].reshape(DRAWN, batch)
        written = names.written_lengths[rows["written"][ids]].reshape(DRAWN, batch)
        sizes = [
            max(1, round(float(np.mean([rounded(int(longest), limit) for longest in each.max(1)]))))
            for each, limit in zip((read, written), names.limits)
        ]
        sized = replace(model.with_lengths(0, *sizes), max_positions=model.graph.runs[1].rows)
        targets = written - names.beginnings[rows["written"][ids]].reshape(DRAWN, batch)
        return Fullness(sized, real=float(read.mean()) / sizes[0], words=float(targets.mean()) / sizes[1])

    # -- training

    def loss(self, outputs: Mapping[str, Tensor], batch: CaptionBatch) -> Tensor:
        images, texts, words = outputs.values()
        weights = batch.weights
        contrast = self.peers.contrast(images, texts, batch.concepts, weights.form)
        return contrast * weights.contrast + words / len(batch) * weights.words

    # -- evaluation

    def assess(self, model: nn.Module, batch: CaptionBatch) -> Tensor:
        outputs = model(*batch.inputs)
        return self.tally(outputs, batch, self._written(model, batch))

    def tally(
        self, outputs: Mapping[str, Tensor], batch: CaptionBatch, written: Sequence[str] = ()
    ) -> Tensor:
        """The sum of the written loss; how many names are right, and how many there are, by language of captions, then
        of translations between trained pairs and between others; and vectors by image and by name, with how often each
        was made."""
        images, texts, words = (output.double() for output in outputs.values())
        source, rows = self._names.source, batch.rows
        count, width = len(source.words.languages), images.shape[1]
        exact = np.zeros((2, count + 2))
        for text, row in zip(written, rows):
            language, other = (int(source.words.language[row[side]]) for side in ("written", "read"))
            kind = language if row["sees"] == IMAGE else count + (not source.trained[other, language])
            exact[:, kind] += text == source.words.texts[row["written"]], 1
        tables = []
        for side, made, most in zip(("image", "read"), (images, texts), self._names.kept(width)):
            numbers = torch.from_numpy(rows[side]).to(made.device)
            here = numbers < most
            counted = torch.cat([made, made.new_ones(len(made), 1)], 1)[here]
            tables.append(made.new_zeros(most, width + 1).index_add_(0, numbers[here], counted).flatten())
        sizes = images.new_tensor([width + 1.0]) * len(batch)
        return torch.cat([words[None], sizes, torch.from_numpy(exact.flatten()).to(images), *tables])

    def accompany(self, model: nn.Module, blank: tuple[Any, ...]) -> None:
        model(*blank)
        if sharded(model):
            self._tokens(model, blank, blank[3])

    def _tokens(self, model: nn.Module, inputs: Sequence[Any], begun: Tensor) -> Tensor:
        """The likeliest tokens (B, steps) behind the first `begun` (B,) of each target. Where ranks share weights, they
        take as many steps."""
        names, (images, source, target, lengths, *_, sees) = self._names, inputs
        end, values = (
            names.tokenizer.end,
            {"images": images, "source": source, "lengths": lengths, "sees": sees},
        )
        prompts = Prompts(target[:, : names.opened].contiguous(), begun, values=values)
        steps = names.most if sharded(model) else names.longest
        greedy = Decoding(max_tokens=steps, early_stopping="full")
        with eagerly():
            return search(cast(Any, model), prompts, greedy, ends=() if end is None else (end,)).tokens[:, 0]

    def _written(self, model: nn.Module, batch: CaptionBatch) -> list[str]:
        """Each name as the model writes it, behind the decoder's first token and its language."""
        tokens = self._tokens(model, batch.inputs, batch.beginnings + 1)
        return self._names.tokenizer.decode_rows(tokens.tolist())

    def metrics(self, samples: int, sums: Sequence[float]) -> dict[str, float]:
        source = self._names.source
        languages = source.words.languages
        total, width, *rest = sums
        exact = np.array(rest[: 2 * len(languages) + 4]).reshape(2, -1)
        tables = np.array(rest[exact.size :]).reshape(-1, round(width / samples))
        kept = self._names.kept(tables.shape[1] - 1)[0]
        results = _recalls(source, tables[:kept], tables[kept:])
        of_kind = exact[0] / np.maximum(exact[1], 1)
        count = len(languages)
        results["captions"] = float(exact[0, :count].sum() / max(1, exact[1, :count].sum()))
        results |= {
            f"captions_{name}": float(share) for name, share, of in zip(languages, of_kind, exact[1]) if of
        }
        results |= {"translations": float(of_kind[count]), "unseen_pairs": float(of_kind[count + 1])}
        weights, results["words_loss"] = self._names.weights, total / samples
        loss = weights.contrast * results["contrast_loss"] + weights.words * results["words_loss"]
        return {"loss": loss, **results}

    def describe_model(self, model: ModelConfig) -> str:
        features = model.graph.heads_of(VectorHead)[0].features
        return f"images and {super().describe_model(model)}, vectors of {features}"

    def sample(self, model: nn.Module, source: Source, device: torch.device) -> str:
        """The first captions and translations, each beside its reference."""
        assert isinstance(source, Captions)
        batch = self.prepare(source, cast(Any, model).config)(first_samples(source, SHOWN), device)
        texts = source.words.texts
        return "\n".join(
            f"{'an image' if row['sees'] == IMAGE else texts[row['read']]} → {text} "
            f"(reference: {texts[row['written']]})"
            for text, row in zip(self._written(model, batch), batch.rows)
        )


def _images(model: ModelConfig) -> PatchInput:
    return model.graph.inputs_of(PatchInput)[0]


class _NameTokens:
    """All names of a source in a tokenizer's numbers, to be read and to be written."""

    def __init__(self, source: Captions, model: ModelConfig) -> None:
        self.source, self.tokenizer = source, cast("Tokenizer", source.tokenizer)
        config: Any = model
        self.weights = Weights(config.contrast_weight, config.words_weight, config.contrast)
        self.limits = [one.length for one in model.graph.inputs_of(TokenInput)]
        words, tokenizer = source.words, self.tokenizer
        end = () if tokenizer.end is None else (tokenizer.end,)
        opened = tokenizer.encode_target([beginning(words.languages[number]) for number in words.language])
        read, text = tokenizer.framed(words.texts), tokenizer.encode_target(words.texts)
        written = [[*before, *own, *end] for before, own in zip(opened, text, strict=True)]
        for rows, limit, setting in zip((read, written), self.limits, ("sequence", "writer_sequence")):
            if (longest := max(map(len, rows))) > limit:
                raise ConfigError(
                    f"A name of {source.title} has {longest} tokens, but model.{setting} is {limit}; set it to "
                    f"{longest}."
                )
        self.read, self.read_lengths = padded(read, tokenizer.pad)
        self.written, self.written_lengths = padded(written, tokenizer.pad)
        self.beginnings = np.array([len(before) for before in opened])
        self.opened = int(self.beginnings.max()) + 1
        self.most = self.limits[1] - int(self.beginnings.max())
        """Tokens that there is room for behind any beginning."""
        self.longest = min(self.most, int((self.written_lengths - self.beginnings).max()) + 1)

    def kept(self, width: int) -> tuple[int, int]:
        """How many images and names an evaluation keeps the vectors of."""
        most = MOST // (2 * (width + 1))
        return min(len(self.source.pictures.images), most), min(len(self.source.words.texts), most)


def _recalls(source: Captions, images: NDArray[np.float64], texts: NDArray[np.float64]) -> dict[str, float]:
    """Recall@1 both ways, by language and on average, and the contrast of all images with all names in nats, from sums
    of vectors (I, E + 1) and (W, E + 1) with how often each was made."""
    words = source.words
    pictured, named = (np.flatnonzero(table[:, -1] > 0) for table in (images, texts))
    rows = [table[there, :-1] / table[there, -1:] for table, there in ((images, pictured), (texts, named))]
    near = rows[0] @ rows[1].T
    shown, concept = source.pictures.concepts[pictured], words.concept[named]
    language, held = words.language[named], words.held[named]
    right = shown[:, None] == concept
    lse = near.max(1) + np.log(np.exp(near - near.max(1, keepdims=True)).sum(1))
    own = (near * right).sum(1) / np.maximum(right.sum(1), 1)
    recalls = {"contrast_loss": float((lse - own)[right.any(1)].mean())}
    best = right[near.argmax(0), np.arange(len(named))]
    by_language: dict[str, dict[str, tuple[float, float]]] = {"image_to_text": {}, "text_to_image": {}}
    for number, name in enumerate(words.languages):
        here = np.flatnonzero(language == number)
        has_name = right[:, here].any(1)
        if has_name.any():
            own_names, chosen = right[np.ix_(has_name, here)], near[np.ix_(has_name, here)].argmax(1)
            hits = own_names[np.arange(len(chosen)), chosen]
            by_language["image_to_text"][name] = float(hits.mean()), float(own_names.mean())
            by_language["text_to_image"][name] = float(best[here].mean()), float(right[:, here].mean())
    for key, of in by_language.items():
        means = np.mean([*of.values()], axis=0) if of else np.zeros(2)
        recalls[key], recalls[f"{key}_chance"] = means.tolist()
        recalls |= {f"{key}_{name}": recall for name, (recall, _) in of.items()}
    recalls["unseen_words"] = float(best[held].mean()) if held.any() else 0.0
    return recalls


class PrepareCaptions:
    """Makes batches: images as `PrepareImages` does, and names cut to the longest of the batch."""

    def __init__(
        self, source: Captions, model: ModelConfig, names: _NameTokens, augment: Augment | None, seed: int
    ) -> None:
        self.source, self.names = source, names
        self.smoothing = 0.0 if augment is None else augment.label_smoothing
        if augment is not None:
            augment = replace(augment, mixup=0.0, cutmix=0.0, label_smoothing=0.0)
        size, classes = _images(model).image_size, len(source.classes)
        self.images = PrepareImages(source, image_size=size, classes=classes, augment=augment, seed=seed)

    def __call__(self, host: HostBatch, device: torch.device) -> CaptionBatch:
        names, rows, pictures = self.names, self.source.rows[host.ids], self.images(host, device)
        lengths, ends = names.read_lengths[rows["read"]], names.written_lengths[rows["written"]]
        source = names.read[rows["read"]][:, : rounded(int(lengths.max()), names.limits[0])]
        target = names.written[rows["written"]][:, : rounded(int(ends.max()), names.limits[1])]
        begun = names.beginnings[rows["written"]]
        places = np.arange(target.shape[1])
        targeted = (places < ends[:, None]) & (places >= begun[:, None])
        inputs = (
            pictures.images, on_device(source, device), on_device(shifted(target, names.tokenizer.start), device),
            on_device(lengths, device), on_device(np.where(targeted, target, IGNORED), device), None, self.smoothing,
            None, on_device(rows["sees"], device),
        )  # fmt: skip
        return CaptionBatch(
            inputs=inputs, ids=host.ids, tokens=int(lengths.sum() + ends.sum()), concepts=pictures.targets, rows=rows,
            beginnings=on_device(begun, device), weights=names.weights,
        )  # fmt: skip
