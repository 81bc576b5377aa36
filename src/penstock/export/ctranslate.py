"""A model as a folder of CTranslate2, written by that package's own converter from transformers' format.

Encoder–decoders and decoders are converted whole. An encoder returns features of its tokens, because CTranslate2 has no
heads for words or classes. Tokens have the names of the folder's tokenizer; without a tokenizer their ids are the
names. Tokens that the model must never generate have a bias against them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.boundary.files import printable
from penstock.boundary.hub import local_weights
from penstock.boundary.packages import package
from penstock.config.decoding import Decoding
from penstock.config.formats import FORMATS
from penstock.config.model import stacks
from penstock.config.plan import Plan
from penstock.config.stack import Stack
from penstock.config.theirs.read import read_json
from penstock.errors import ConfigError
from penstock.export import ExportType
from penstock.infer.load import Loaded, loaded

_NEVER = -1e4
"""Bias of a token that must not be generated; fp16 holds it."""
_LEAST = -100.0
"""Log-probabilities below this value count as equal."""


def write_ctranslate(
    model: str | Path, target: Path, kind: ExportType, draw: Callable[[nn.Module], dict[str, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Convert the model of a folder for CTranslate2 into the folder `target`, with linear layers and embeddings in a
    type. Returns the outputs of CTranslate2 and of the model for inputs from `draw`: features of tokens, or
    log-probabilities.

    Raises ConfigError for models that CTranslate2's converter refuses, and EnvironmentProblem without the packages.
    """
    ctranslate2 = package("ctranslate2", "CTranslate2's folders need the package ctranslate2", "export")
    transformers = package("transformers", "CTranslate2's folders need the package transformers", "hf")
    folder = local_weights(model)
    source = loaded(folder, Plan(), weights="plain", tokenizer=None)
    if problems := list(_problems(source, folder)):
        raise ConfigError(problems)
    names = _Names(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    verbosity = transformers.logging.get_verbosity()
    with tempfile.TemporaryDirectory(dir=target.parent) as partial:
        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()
        try:
            _converter(ctranslate2, folder, source, names).convert(
                partial, quantization=FORMATS[kind].dtype, force=True
            )
        except (ValueError, NotImplementedError, KeyError) as error:
            why = " ".join(printable(str(error)).split())[:200].rstrip(".")
            raise ConfigError(
                f"CTranslate2's converter refuses the model: {why}; choose --to {_other_form(source)}."
            ) from None
        finally:
            transformers.logging.set_verbosity(verbosity)
            transformers.logging.enable_progress_bar()
        target.mkdir(exist_ok=True)
        for file in Path(partial).iterdir():
            file.replace(target / file.name)
    inputs = draw(source.model)
    with torch.inference_mode():
        return _converted_outputs(source, inputs, names.words, target), _own_outputs(source, inputs)


def _problems(source: Loaded, folder: Path) -> Iterator[str]:
    """Reasons against converting a model that the converter does not report, or reports only in its own terms."""
    generates = source.model.graph.writer is not None
    if str(read_json(folder / "config.json").get("model_type")).startswith("penstock_"):
        form = _other_form(source)
        yield f"CTranslate2 converts models of transformers, which has none like this; choose --to {form}."
    elif not generates and source.model.graph.vision:
        yield "CTranslate2 converts text models; choose --to onnx."
    for feature in _unconverted(source.model.config):
        yield f"The export to CTranslate2 does not know {feature}; choose --to {_other_form(source)}."
    if generates and not source.ends:
        yield (
            "The model's config.json has no eos_token_id, the token that ends a text, which CTranslate2 must know; add "
            "it there."
        )
    if source.model.graph.remembered and source.start is None:
        yield (
            "The model's config.json has no decoder_start_token_id, the token that its decoder begins with; add it "
            "there."
        )


def _unconverted(config: Any) -> list[str]:
    """Features of a model that CTranslate2's converter drops silently."""
    every = stacks(config)
    rotary = [layer.rotary for stack in every if stack.positions == "rotary" for layer in stack.kinds]
    features = {
        "sliding windows": any(stack.window is not None for stack in every),
        "attention sinks": any(stack.sinks for stack in every),
        "attention with latents": any(stack.latent for stack in every),
        "norms of what attention and MLP return, or of weights around zero": any(
            stack.layers[0].norms_branches or stack.norm_zero_centred for stack in every
        ),
        "norms over all heads": any(stack.qk_norm_whole for stack in every),
        "rotary positions of some blocks, of a part of each head, of neighbours, or scaled pair by pair": any(
            one is None or one.interleaved or one.share < 1 or one.scaling == "longrope" for one in rotary
        ),
        "caps of scores or logits": any(stack.score_cap for stack in every)
        or getattr(config, "logit_cap", None),
        "two norm_eps in one model": len({stack.norm_eps for stack in every}) > 1,
    }
    return [feature for feature, present in features.items() if present]


def _other_form(source: Loaded) -> str:
    return "onnx-cache" if source.model.graph.generates else "onnx"


class _Names:
    """A unique name for each of the model's tokens, by the methods that the converter calls on tokenizers.

    The converter needs a name for every token of the model and every special token; tokenizers often have fewer.
    """

    def __init__(self, source: Loaded) -> None:
        size: int = source.model.config.vocabulary
        tokenizer = source.tokenizer
        words = [str(number) for number in range(size)] if tokenizer is None else tokenizer.words()
        words = [*words[:size], *[""] * (size - len(words))]
        self.words = [word or f"<unused_{number}>" for number, word in enumerate(words)]

        def name(number: int | None) -> str:
            return self.eos_token if number is None else self.words[number]

        self.eos_token = self.words[source.ends[0] if source.ends else 0]
        self.unk_token = name(None if tokenizer is None else tokenizer.unknown)
        self.bos_token = name(None if tokenizer is None else tokenizer.begin)
        self.pad_token = name(None if tokenizer is None else tokenizer.pad)

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def convert_ids_to_tokens(self, number: int) -> str:
        return self.words[number]


def _converter(ctranslate2: Any, folder: Path, source: Loaded, names: _Names) -> Any:
    """CTranslate2's converter of a folder, with additions: names for all tokens, the decoders' start token, forbidden
    tokens, and for some families the norms' epsilon and settings of attention."""
    library: Any = ctranslate2.converters.transformers

    class MarianLoader(library.BartLoader):  # type: ignore[misc]
        """Loader of Marian models that keeps the embedding of the decoder's start token. The converter's own loader
        drops the last row of the embedding and starts decoders with zeros, which only suits Marian's own weights."""

        architecture_name = "MarianMTModel"

        def get_model_spec(self, model: Any) -> Any:
            model.config.normalize_before = model.config.normalize_embedding = False
            return super().get_model_spec(model)

    class Converter(library.TransformersConverter):  # type: ignore[misc]
        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            model = super().load_model(*args, **kwargs)
            model.config.decoder_start_token_id = source.start
            _forbid(model, _never(source))
            return model

        def load_tokenizer(self, *args: Any, **kwargs: Any) -> Any:
            return names

        def _load(self) -> Any:
            spec = super()._load()
            sides = [getattr(spec, side) for side in ("encoder", "decoder") if hasattr(spec, side)]
            for side, sizes in zip(sides, stacks(source.model.config), strict=True):
                spec.config.layer_norm_epsilon = sizes.norm_eps
                for layer in side.layer:
                    for name in ("self_attention", "attention"):
                        # The runtime reads all of these, but the specification declares only some.
                        if hasattr(layer, name):
                            vars(getattr(layer, name)).update(_omitted_settings(sizes))
            return spec

    library.register_loader("MarianConfig")(MarianLoader)
    return Converter(str(folder))


def _omitted_settings(sizes: Stack) -> dict[str, Any]:
    """Attention settings that the converters of some families leave out."""
    settings: dict[str, Any] = {}
    layer = sizes.layers[0]
    if layer.heads * layer.head_width != sizes.width:
        settings["head_dim"] = np.int32(layer.head_width)
    rotary = sizes.rotary
    if sizes.positions == "rotary" and rotary.scaling == "llama3":
        settings |= {
            "rotary_low_freq_factor": np.float32(rotary.low),
            "rotary_high_freq_factor": np.float32(rotary.high),
            "rotary_scaling_factor": np.float32(rotary.factor),
            "original_max_position_embeddings": np.int32(rotary.trained),
        }
    return settings


def _never(source: Loaded) -> list[int]:
    """Ids of the tokens that must not be generated."""
    biases = Decoding(bias=tuple(source.usual.get("bias", ()))).biases
    return [numbers[0] for numbers, amount in biases if len(numbers) == 1 and amount == -math.inf]


def _forbid(model: Any, numbers: list[int]) -> None:
    """Give a transformers model a bias against tokens, where the converter looks for one."""
    head = model.get_output_embeddings() if numbers else None
    if head is None:
        return
    bias = getattr(model, "final_logits_bias", None)
    if bias is None:
        head.bias = nn.Parameter(torch.zeros(head.out_features) if head.bias is None else head.bias.detach())
        bias = head.bias
    bias[..., numbers] += _NEVER


def _own_outputs(source: Loaded, inputs: dict[str, Tensor]) -> Tensor:
    """The model's outputs; with a target, the log-probabilities of each of its tokens and of the end token."""
    model = source.model
    if model.graph.writer is None:
        features: Tensor = model.features(inputs["tokens"], inputs["lengths"])
        return features[_not_padding(inputs)]
    if not model.graph.remembered:
        return _log_shares(model(inputs["tokens"]), source)
    target = inputs["target"]
    start, end = (torch.full_like(target[:, :1], number) for number in (source.start or 0, source.ends[0]))
    logits = model(inputs["source"], torch.cat([start, target], dim=1), inputs["lengths"])
    return _log_shares(logits, source).gather(2, torch.cat([target, end], dim=1)[:, :, None])[:, :, 0]


def _log_shares(logits: Tensor, source: Loaded) -> Tensor:
    logits[..., _never(source)] += _NEVER
    return logits.log_softmax(-1).clamp(min=_LEAST)


def _converted_outputs(source: Loaded, inputs: dict[str, Tensor], names: list[str], folder: Path) -> Tensor:
    """CTranslate2's outputs for the same inputs, in the form of `_own_outputs`."""
    import ctranslate2

    threads = {"intra_threads": torch.get_num_threads()}
    padded = inputs["source" if "source" in inputs else "tokens"].tolist()
    lengths = inputs["lengths"].tolist() if "lengths" in inputs else [len(row) for row in padded]
    rows = [row[:length] for row, length in zip(padded, lengths, strict=True)]
    if source.model.graph.writer is None:
        features = ctranslate2.Encoder(str(folder), **threads).forward_batch(rows).last_hidden_state
        return _tensor(features)[_not_padding(inputs)]
    if not source.model.graph.remembered:
        log_shares = ctranslate2.Generator(str(folder), **threads).forward_batch(rows, return_log_probs=True)
        return _tensor(log_shares).clamp(min=_LEAST)
    sources, targets = (
        [[names[n] for n in row] for row in side] for side in (rows, inputs["target"].tolist())
    )
    scores = ctranslate2.Translator(str(folder), **threads).score_batch(sources, targets)
    return torch.tensor([score.log_probs for score in scores]).clamp(min=_LEAST)


def _not_padding(inputs: dict[str, Tensor]) -> Tensor:
    """Mask of the tokens that are not padding."""
    return torch.arange(inputs["tokens"].shape[1]) < inputs["lengths"][:, None]


def _tensor(view: Any) -> Tensor:
    import ctranslate2

    return torch.from_numpy(np.array(view.to(ctranslate2.DataType.float32)))
