"""Images and their names in one space, and captions and translations of either (Yu et al., TMLR 2022, "CoCa").

Shapes: B samples, L tokens of a name that is read, T tokens of a name that is written, E features of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.config.decoding import Decoding
from penstock.config.graph import TokenInput, VectorHead
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
from penstock.kernels.contrast import ContrastForm, plain_contrast
from penstock.kernels.cross_entropy import IGNORED
from penstock.tasks.embedding import MOST
from penstock.tasks.task import Fullness, Prepare
from penstock.tasks.text import (
    DRAWN,
    TextBatch,
    TextTask,
    first_samples,
    on_device,
    padded,
    padded_length,
    rounded,
    shifted,
    tokenizer_of,
)  # fmt: skip

SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionBatch(TextBatch):
    """A batch of images, names to read, and names to write."""

    concepts: Tensor
    """(B,) the concept that each sample shows."""
    rows: NDArray[Any]
    """(B,) records of `penstock.data.captions.Captions.rows`, on the host."""
    weights: tuple[ContrastForm, float, float]
    """Form of the contrast, and the factors of the contrast and of the loss of words."""


class Captioning(TextTask):
    """The mean over samples of the contrastive loss (half for finding each image's name in the batch, half for finding
    each name's image) and of the loss of the written name, summed over its tokens; each times its weight in the model's
    configuration. An image matches the names of its concept in all languages. With several ranks the contrast is over
    the batches of all ranks, and gradients flow back to each.

    The decoder is given the language as the beginning of its text: `de: sieben`.

    Metrics are of a whole split. `image_to_text` and `text_to_image` are recall@1 among the names of a language and
    among images, averaged over languages; `unseen_words` is the latter for names that were not in training; `captions`
    and `translations` are the shares of names that are written exactly, `unseen_pairs` the share for pairs of languages
    that were never translated in training. A language as suffix (`captions_de`) restricts a metric to this language;
    the suffix `_chance` means the recall of guessing, which is high if a split has few names of a language.
    """

    unit = "captions"
    compares = True
    augments = frozenset({field.name for field in fields(Augment)} - {"mixup", "cutmix"})
    shown = (
        "image→text {image_to_text:.1%} (chance {image_to_text_chance:.1%})",
        "text→image {text_to_image:.1%} (chance {text_to_image_chance:.1%})",
        "unseen words {unseen_words:.1%}", "captions {captions:.1%}", "translations {translations:.1%}",
        "unseen pairs {unseen_pairs:.1%}", "loss {loss:.4f}",
    )  # fmt: skip
    _made: PrepareCaptions
    """Set by `prepare`, with all names of its source."""

    # -- data

    def open(self, data: DataConfig, model: ModelConfig, split: Split) -> Source:
        images = model.graph.images
        source = open_captions(data, split, channels=images.channels, image_size=images.image_size)
        source.tokenizer = self.tokenizer(data)
        if data.transform is not None:
            source.transform = load_function(data.transform, "data.transform")
        return source

    def fit(self, model: ModelConfig, source: Source) -> ModelConfig:
        """The model with a vocabulary as large as the tokenizer's. Raises ConfigError if names are too long."""
        PrepareCaptions(cast(Captions, source), model)
        return self.fit_vocabulary(model, tokenizer_of(source))

    def prepare(
        self, source: Source, model: ModelConfig, *, augment: Augment | None = None, seed: int = 0
    ) -> Prepare:
        self._made = PrepareCaptions(cast(Captions, source), model, augment, seed)
        return self._made

    def blank(self, model: ModelConfig, device: torch.device) -> tuple[Any, ...]:
        token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        empty = torch.zeros(1, *model.graph.images.shape, device=device)
        target = token.expand(1, model.graph.inputs[2].length)
        return model.graph.ordered(
            images=empty, source=token, target=target, lengths=token[0] + 1, smoothing=0.0, memory_index=token[0]
        )  # fmt: skip

    def fullness(self, source: Source, model: ModelConfig, batch: int) -> Fullness:
        made = PrepareCaptions(cast(Captions, source), model)
        rows = made.source.rows[Stream(len(source), 0).ids(0, DRAWN * batch)].reshape(DRAWN, batch)
        read, written = made.read_lengths[rows["read"]], made.written_lengths[rows["written"]]
        sizes = [
            max(1, round(padded_length(each, limit))) for each, limit in zip((read, written), made.limits)
        ]
        sized = replace(model.with_lengths(0, *sizes), max_positions=model.graph.runs[1].rows)
        targets = written - made.beginnings[rows["written"]]
        return Fullness(sized, real=float(read.mean()) / sizes[0], words=float(targets.mean()) / sizes[1])

    # -- training

    def loss(self, outputs: Mapping[str, Tensor], batch: CaptionBatch) -> Tensor:
        images, texts, words = outputs.values()
        form, of_contrast, of_words = batch.weights
        contrast = self.peers.contrast(images, texts, batch.concepts, form)
        return contrast * of_contrast + words / len(batch) * of_words

    # -- evaluation

    def assess(self, model: nn.Module, batch: CaptionBatch) -> Tensor:
        outputs = model(*batch.inputs)
        return self.tally(outputs, batch, self._written(model, batch))

    def tally(
        self, outputs: Mapping[str, Tensor], batch: CaptionBatch, written: Sequence[str] = ()
    ) -> Tensor:
        """The summed loss of written names; the number of correct names and of all, by language for captions, then for
        translations between pairs of languages in training and between other pairs; and for each image and each name
        the sum of its vectors and their number."""
        images, texts, words = (output.double() for output in outputs.values())
        source, rows = self._made.source, batch.rows
        count = len(source.words.languages)
        exact = np.zeros((2, count + 2))
        for text, row in zip(written, rows):
            language, read = (int(source.words.language[row[side]]) for side in ("written", "read"))
            kind = language if row["sees"] == IMAGE else count + (not source.trained[read, language])
            exact[:, kind] += text == source.words.texts[row["written"]], 1
        tables = []
        for side, vectors, most in zip(("image", "read"), (images, texts), self._made.kept):
            numbers = torch.from_numpy(rows[side]).to(vectors.device)
            counted = F.pad(vectors, (0, 1), value=1.0)
            here = numbers < most
            table = counted.new_zeros(most, counted.shape[1])
            tables.append(table.index_add_(0, numbers[here], counted[here]).flatten())
        return torch.cat([words[None], torch.from_numpy(exact.flatten()).to(images), *tables])

    def accompany(self, model: nn.Module, blank: tuple[Any, ...]) -> None:
        model(*blank)
        if sharded(model):
            self._tokens(model, blank, blank[3])

    def _tokens(self, model: Any, inputs: Sequence[Any], begun: Tensor) -> Tensor:
        """The likeliest tokens (B, steps) after the first `begun` (B,) tokens of each target."""
        made, arguments = self._made, dict(zip(model.graph.arguments, inputs))
        values = {name: arguments[name] for name in ("images", "source", "lengths", "memory_index")}
        prompts = Prompts(arguments["target"][:, : made.opened].contiguous(), begun, values=values)
        greedy, end = Decoding(max_tokens=made.steps, early_stopping="full"), made.tokenizer.end
        with eagerly():
            return search(model, prompts, greedy, ends=() if end is None else (end,)).tokens[:, 0]

    def _written(self, model: nn.Module, batch: CaptionBatch) -> list[str]:
        """Each name as the model writes it, after the decoder's first token and the language."""
        begun = self._made.beginnings[batch.rows["written"]] + 1
        tokens = self._tokens(model, batch.inputs, on_device(begun, batch.concepts.device))
        return self._made.tokenizer.decode_rows(tokens.tolist())

    def metrics(self, samples: int, sums: Sequence[float]) -> dict[str, float]:
        made, languages = self._made, self._made.source.words.languages
        count, total = len(languages), sums[0]
        exact, tables = np.split(np.array(sums[1:]), [2 * (count + 2)])
        right, counts = exact.reshape(2, -1)
        results = _recalls(made.source, *np.split(tables.reshape(sum(made.kept), -1), made.kept[:1]))
        *captions, translations, unseen_pairs = (right / np.maximum(counts, 1)).tolist()
        results["captions"] = float(right[:count].sum() / max(1, counts[:count].sum()))
        results |= {f"captions_{name}": share for name, share, of in zip(languages, captions, counts) if of}
        results |= {"translations": translations, "unseen_pairs": unseen_pairs, "words_loss": total / samples}
        _, of_contrast, of_words = made.weights
        loss = of_contrast * results["contrast_loss"] + of_words * results["words_loss"]
        return {"loss": loss, **results}

    def describe_model(self, model: ModelConfig) -> str:
        features = model.graph.heads_of(VectorHead)[0].features
        return f"images and {super().describe_model(model)}, vectors of {features}"

    def sample(self, model: nn.Module, source: Source, device: torch.device) -> str:
        """The first captions and translations, each with its reference."""
        batch = self.prepare(source, cast(Any, model).config)(first_samples(source, SHOWN), device)
        texts = self._made.source.words.texts
        return "\n".join(
            f"{'an image' if row['sees'] == IMAGE else texts[row['read']]} → {text} "
            f"(reference: {texts[row['written']]})"
            for text, row in zip(self._written(model, batch), batch.rows)
        )


def _recalls(source: Captions, images: NDArray[np.float64], texts: NDArray[np.float64]) -> dict[str, float]:
    """Recall@1 in both directions, by language and on average, and the contrastive loss of all images with all names in
    nats, from sums of vectors (I, E + 1) and (W, E + 1), whose last column is their number."""
    words = source.words
    pictured, named = (np.flatnonzero(table[:, -1] > 0) for table in (images, texts))
    rows = [table[shown, :-1] / table[shown, -1:] for table, shown in ((images, pictured), (texts, named))]
    near, groups = rows[0] @ rows[1].T, (source.pictures.concepts[pictured], words.concept[named])
    right, held = groups[0][:, None] == groups[1], words.held[named]
    tensors = [torch.from_numpy(each) for each in (*rows, *groups)]
    losses = plain_contrast(tensors[0], tensors[1], tensors[2], tensors[3]).numpy()
    recalls = {"contrast_loss": float(losses[right.any(1)].mean())}
    best = right[near.argmax(0), np.arange(len(named))]
    by_language: dict[str, dict[str, tuple[float, float]]] = {"image_to_text": {}, "text_to_image": {}}
    for number, name in enumerate(words.languages):
        here = np.flatnonzero(words.language[named] == number)
        own = np.ix_(right[:, here].any(1), here)
        if right[own].size:
            hits = np.take_along_axis(right[own], near[own].argmax(1)[:, None], 1)
            by_language["image_to_text"][name] = float(hits.mean()), float(right[own].mean())
            by_language["text_to_image"][name] = float(best[here].mean()), float(right[:, here].mean())
    for key, of in by_language.items():
        means = np.mean([*of.values()], axis=0) if of else np.zeros(2)
        recalls[key], recalls[f"{key}_chance"] = means.tolist()
        recalls |= {f"{key}_{name}": recall for name, (recall, _) in of.items()}
    recalls["unseen_words"] = float(best[held].mean()) if held.any() else 0.0
    return recalls


class PrepareCaptions:
    """Makes batches: images as `PrepareImages` does, and token numbers of names to read and to write, cut to the
    longest in the batch. Raises ConfigError for names that are too long for the model."""

    def __init__(
        self, source: Captions, model: ModelConfig, augment: Augment | None = None, seed: int = 0
    ) -> None:
        self.source, self.tokenizer, self.graph = source, tokenizer_of(source), model.graph
        config: Any = model
        self.weights = config.contrast, config.contrast_weight, config.words_weight
        self.smoothing = 0.0 if augment is None else augment.label_smoothing
        if augment is not None:
            augment = replace(augment, mixup=0.0, cutmix=0.0, label_smoothing=0.0)
        size = model.graph.images.image_size
        self.images = PrepareImages(source, image_size=size, classes=0, augment=augment, seed=seed)
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
        """Number of given tokens at the beginning of each written name: its language."""
        self.opened = int(self.beginnings.max()) + 1
        longest = int((self.written_lengths - self.beginnings).max()) + 1
        self.steps = min(longest, self.limits[1] + 1 - self.opened)
        """Tokens that an evaluation writes after the given beginning: the longest name."""
        head = model.graph.heads_of(VectorHead)[0]
        most = MOST // (2 * (head.features + 1 + (head.offset is not None)))
        self.kept = min(len(source.pictures.images), most), min(len(words.texts), most)
        """Most images and names whose vectors an evaluation stores."""

    def __call__(self, host: HostBatch, device: torch.device) -> CaptionBatch:
        rows, pictures = self.source.rows[host.ids], self.images(host, device)
        read, written = rows["read"], rows["written"]
        lengths, ends = self.read_lengths[read], self.written_lengths[written]
        begun = self.beginnings[written]
        source = self.read[read][:, : rounded(int(lengths.max()), self.limits[0])]
        target = self.written[written][:, : rounded(int(ends.max()), self.limits[1])]
        places = np.arange(target.shape[1])
        targeted = (places < ends[:, None]) & (places >= begun[:, None])
        tokens = {"source": source, "target": shifted(target, self.tokenizer.start), "lengths": lengths}
        others = {"targets": np.where(targeted, target, IGNORED), "memory_index": rows["sees"]}
        inputs = self.graph.ordered(images=pictures.images, smoothing=self.smoothing, **tokens, **others)
        return CaptionBatch.of(
            host, device, inputs, tokens=int(lengths.sum() + ends.sum()), concepts=pictures.targets, rows=rows,
            weights=self.weights,
        )  # fmt: skip
