"""A model as a folder of CTranslate2, written by that package's own converter from transformers' format.

Encoder–decoders and decoders are converted whole. An encoder gives the features of its tokens, because CTranslate2 has
no heads for words or classes. Tokens have the names of the folder's tokenizer; without one their numbers are the names.
Tokens that the model must never generate have a bias against them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.boundary.files import printable
from penstock.config.decoding import Decoding
from penstock.config.formats import FORMATS
from penstock.config.model import stacks
from penstock.config.plan import Plan
from penstock.config.stack import Stack
from penstock.errors import ConfigError, EnvironmentProblem
from penstock.export import ExportType
from penstock.infer.load import Loaded, loaded
from penstock.models.convert.files import read_json
from penstock.models.convert.hub import local_weights

_NEVER = -1e4
"""Bias of a token that must not be generated; fp16 holds it."""
_LEAST = -100.0
"""Log-probabilities below this count as equal."""


def write_ctranslate(
    model: str | Path, target: Path, kind: ExportType, draw: Callable[[nn.Module], dict[str, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Write the model in a folder for CTranslate2 into the folder `target`, linear layers and embeddings in a type.
    Returns what CTranslate2 and what the model makes of the inputs that `draw` draws for it: features of tokens, or
    log-probabilities.

    Raises ConfigError for what CTranslate2's converter refuses, and EnvironmentProblem without the packages.
    """
    try:
        import ctranslate2
        import transformers
    except ImportError:
        raise EnvironmentProblem(
            "CTranslate2's folders need the packages ctranslate2 and transformers. Install them with: pip install "
            "'penstock[export,hf]'."
        ) from None
    folder = local_weights(model)
    found = loaded(folder, Plan(), weights="plain", tokenizer=None)
    if problems := list(_problems(found, folder)):
        raise ConfigError(problems)
    names = _Names(found)
    target.parent.mkdir(parents=True, exist_ok=True)
    told = transformers.logging.get_verbosity()
    with tempfile.TemporaryDirectory(dir=target.parent) as partial:
        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()
        try:
            _converter(ctranslate2, folder, found, names).convert(
                partial, quantization=FORMATS[kind].dtype, force=True
            )
        except (ValueError, NotImplementedError, KeyError) as error:
            why = " ".join(printable(str(error)).split())[:200].rstrip(".")
            raise ConfigError(
                f"CTranslate2's converter refuses the model: {why}; choose --to {_instead(found)}."
            ) from None
        finally:
            transformers.logging.set_verbosity(told)
            transformers.logging.enable_progress_bar()
        target.mkdir(exist_ok=True)
        for file in Path(partial).iterdir():
            file.replace(target / file.name)
    given = draw(found.model)
    with torch.inference_mode():
        return _theirs(found, given, names.words, target), _ours(found, given)


def _problems(found: Loaded, folder: Path) -> Iterator[str]:
    """Why a model cannot be converted, where the converter would not say it, or not so that a user knows what to do."""
    generates = found.model.graph.writer is not None
    if str(read_json(folder / "config.json").get("model_type")).startswith("penstock_"):
        yield f"CTranslate2 converts models of transformers, which has none like this; choose --to {_instead(found)}."
    elif not generates and found.model.graph.vision:
        yield "CTranslate2 converts text models; choose --to onnx."
    for what in dict.fromkeys(_unconverted(found.model.config)):
        yield f"The export to CTranslate2 does not know {what}; choose --to {_instead(found)}."
    if generates and not found.ends:
        yield (
            "The model does not say which token ends a text, which CTranslate2 must know; write eos_token_id into its "
            "config.json."
        )
    if found.model.graph.remembered and found.start is None:
        yield (
            "The model does not say which token its decoder begins with; write decoder_start_token_id into its "
            "config.json."
        )


def _unconverted(config: Any) -> Iterator[str]:
    """Features of a model that CTranslate2's converter drops silently."""
    every = stacks(config)
    if any(stack.window is not None for stack in every):
        yield "sliding windows"
    if len({stack.norm_eps for stack in every}) > 1:
        yield "two norm_eps in one model"


def _instead(found: Loaded) -> str:
    return "onnx-cache" if found.model.graph.writer else "onnx"


class _Names:
    """A name for each of the model's tokens, no two of them alike, as the converter asks transformers' tokenizers.

    It needs exactly as many as the model has, and names for all special tokens; tokenizers often have fewer.
    """

    def __init__(self, found: Loaded) -> None:
        size: int = found.model.config.vocabulary
        tokenizer = found.tokenizer
        words = [str(number) for number in range(size)] if tokenizer is None else tokenizer.words()
        words = [*words[:size], *[""] * (size - len(words))]
        self.words = [word or f"<unused_{number}>" for number, word in enumerate(words)]

        def name(number: int | None) -> str:
            return self.eos_token if number is None else self.words[number]

        self.eos_token = self.words[found.ends[0] if found.ends else 0]
        self.unk_token = name(None if tokenizer is None else tokenizer.unknown)
        self.bos_token = name(None if tokenizer is None else tokenizer.begin)
        self.pad_token = name(None if tokenizer is None else tokenizer.pad)

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def convert_ids_to_tokens(self, number: int) -> str:
        return self.words[number]


def _converter(ctranslate2: Any, folder: Path, found: Loaded, names: _Names) -> Any:
    """CTranslate2's converter of a folder, with what it leaves out: names for all tokens, the token that decoders begin
    with, forbidden tokens, and for some families the norms' epsilon and settings of attention."""
    theirs: Any = ctranslate2.converters.transformers

    class Marian(theirs.BartLoader):  # type: ignore[misc]
        """Marian with the embedding that its decoder begins with. The converter's own drops the last row of the
        embedding, and lets decoders begin with zeros, which only suits weights that Marian itself has trained."""

        architecture_name = "MarianMTModel"

        def get_model_spec(self, model: Any) -> Any:
            model.config.normalize_before = model.config.normalize_embedding = False
            return super().get_model_spec(model)

    class Converter(theirs.TransformersConverter):  # type: ignore[misc]
        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            model = super().load_model(*args, **kwargs)
            model.config.decoder_start_token_id = found.start
            _forbid(model, _never(found))
            return model

        def load_tokenizer(self, *args: Any, **kwargs: Any) -> Any:
            return names

        def _load(self) -> Any:
            spec = super()._load()
            sides = [getattr(spec, side) for side in ("encoder", "decoder") if hasattr(spec, side)]
            for side, sizes in zip(sides, stacks(found.model.config), strict=True):
                spec.config.layer_norm_epsilon = sizes.norm_eps
                for layer in side.layer:
                    for name in ("self_attention", "attention"):
                        # The runtime reads these, but the specification declares only some.
                        if hasattr(layer, name):
                            vars(getattr(layer, name)).update(_left_out(sizes))
            return spec

    theirs.register_loader("MarianConfig")(Marian)
    return Converter(str(folder))


def _left_out(sizes: Stack) -> dict[str, Any]:
    """Settings of an attention that the converters of some families leave out."""
    settings: dict[str, Any] = {}
    if sizes.heads * sizes.head_width != sizes.width:
        settings["head_dim"] = np.int32(sizes.head_width)
    rotary = sizes.rotary
    if sizes.positions == "rotary" and rotary.scaling == "llama3":
        settings |= {
            "rotary_low_freq_factor": np.float32(rotary.low),
            "rotary_high_freq_factor": np.float32(rotary.high),
            "rotary_scaling_factor": np.float32(rotary.factor),
            "original_max_position_embeddings": np.int32(rotary.trained),
        }
    return settings


def _never(found: Loaded) -> list[int]:
    """Numbers of the tokens that must not be generated."""
    size: int = found.model.config.vocabulary
    return [number for number, _ in Decoding(bias=found.never).biases if number < size]


def _forbid(model: Any, numbers: list[int]) -> None:
    """Give a model of transformers a bias against tokens, in the place where the converter looks for one."""
    head = model.get_output_embeddings() if numbers else None
    if head is None:
        return
    bias = getattr(model, "final_logits_bias", None)
    if bias is None:
        head.bias = nn.Parameter(torch.zeros(head.out_features) if head.bias is None else head.bias.detach())
        bias = head.bias
    bias[..., numbers] += _NEVER


def _ours(found: Loaded, given: dict[str, Tensor]) -> Tensor:
    """The model's outputs; with a target, the log-probabilities of each token and of the end after it."""
    model = found.model
    if model.graph.writer is None:
        features: Tensor = model.features(given["tokens"], given["lengths"])
        return features[_real(given)]
    if not model.graph.remembered:
        return _likely(model(given["tokens"]), found)
    target = given["target"]
    start, end = (torch.full_like(target[:, :1], number) for number in (found.start or 0, found.ends[0]))
    likely = _likely(model(given["source"], torch.cat([start, target], dim=1), given["lengths"]), found)
    return likely.gather(2, torch.cat([target, end], dim=1)[:, :, None])[:, :, 0]


def _likely(logits: Tensor, found: Loaded) -> Tensor:
    logits[..., _never(found)] += _NEVER
    return logits.log_softmax(-1).clamp(min=_LEAST)


def _theirs(found: Loaded, given: dict[str, Tensor], names: list[str], folder: Path) -> Tensor:
    """The same from CTranslate2."""
    import ctranslate2

    how = {"intra_threads": torch.get_num_threads()}
    every = given["source" if "source" in given else "tokens"].tolist()
    lengths = given["lengths"].tolist() if "lengths" in given else [len(row) for row in every]
    rows = [row[:length] for row, length in zip(every, lengths, strict=True)]
    if found.model.graph.writer is None:
        features = ctranslate2.Encoder(str(folder), **how).forward_batch(rows).last_hidden_state
        return _tensor(features)[_real(given)]
    if not found.model.graph.remembered:
        likely = ctranslate2.Generator(str(folder), **how).forward_batch(rows, return_log_probs=True)
        return _tensor(likely).clamp(min=_LEAST)
    sources, targets = (
        [[names[n] for n in row] for row in side] for side in (rows, given["target"].tolist())
    )
    scores = ctranslate2.Translator(str(folder), **how).score_batch(sources, targets)
    return torch.tensor([one.log_probs for one in scores]).clamp(min=_LEAST)


def _real(given: dict[str, Tensor]) -> Tensor:
    """Which tokens are no padding."""
    return torch.arange(given["tokens"].shape[1]) < given["lengths"][:, None]


def _tensor(view: Any) -> Tensor:
    import ctranslate2

    return torch.from_numpy(np.array(view.to(ctranslate2.DataType.float32)))
