"""Opening a trained model for inference: weights in the requested dtype, tokenizer and special tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from penstock.apply import INFERENCE, Setup, apply
from penstock.boundary.files import quoted
from penstock.boundary.hub import local_weights
from penstock.config.formats import Products, Weights
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.config.rules import require_inference
from penstock.config.theirs.read import read_json
from penstock.data.text.open import found_in as found_in
from penstock.data.text.tokenizers import Tokenizer
from penstock.decode.stages import stages_of
from penstock.decode.texts import sharded
from penstock.errors import ConfigError
from penstock.infer.labels import TextLabels, labels_of
from penstock.infer.usual import usual_of
from penstock.models import create
from penstock.models.convert import from_pretrained
from penstock.models.convert.files import described, first_token, settings_in
from penstock.models.convert.pretrained import read_config, rounded_weights
from penstock.models.rounded import plain_state
from penstock.parallel import ALONE, ParallelDims
from penstock.parallel.hosts import Slots, rounds_of
from penstock.parallel.tensor import line_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model ready for inference, and its folder's information about it."""

    model: Any
    tokenizer: Tokenizer | None
    start: int | None = None
    """First token of an encoder–decoder's decoder."""
    ends: tuple[int, ...] = ()
    """Tokens that end a text."""
    usual: Mapping[str, Any]
    """Fields of `Decoding` that the folder sets."""
    classes: tuple[str, ...] = ()
    """Names of a classifier's classes."""
    labels: TextLabels
    """Labels that choose experts."""
    languages: tuple[str, ...] = ()
    """Languages of captions; empty if the folder does not list them."""
    white: float | None = None
    """Value of white in images of more than 8 bits, as in training."""
    whole_bytes: int = 0
    """Bytes of all weights in the model's folder, in the dtype of the computation."""
    bytes: int = 0
    """Bytes of the weights that were read from the folder, before they were split or stored in another form."""
    pooled_first: bool = False
    """Whether an embedding is the first token's features."""


def loaded(
    model: str | Path | nn.Module, plan: Plan, *, weights: Weights | Products, tokenizer: Tokenizer | None,
    device: torch.device | str = "cpu", dims: ParallelDims = ALONE, exact_outputs: bool = False,
    shortlist: Sequence[int] = (), companion: nn.Module | None = None, slots: Sequence[Slots] = (),
    only: Sequence[str] = (), classifies: bool = False,
) -> Loaded:  # fmt: skip
    """Prepare a model, or the model at a path, for inference: in evaluation mode and in the Plan's dtype. Its linear
    layers store weights as `weights` says; with `auto`, a quantised model multiplies as its folder says. A module is
    changed in place, if anything has to change. With several ranks, `dims` is this rank's place: each rank reads the
    whole model on the host and moves its own part to the device. `exact_outputs` is a field of `Setup`. With a
    `shortlist`, a model that generates has logits only for these tokens and those that end a text. `companion` is
    another model that is served together with this one, and `slots` say which experts each rank hosts, as in
    `penstock.parallel.hosts.host_experts`. `only`: if labels choose the experts of the model at the path, read only the
    experts of these labels. With `classifies`, a model with several heads keeps only what its classification head
    needs.

    Raises ConfigError if the Plan needs several devices without ranks, or something that ranks do not support, and the
    errors of opening a folder.
    """
    if plan.gpus != dims.size:
        raise ConfigError(
            f"Layers can be split over devices only to generate text, and texts to generate and to embed; the plan "
            f"asks for {plan.gpus} devices. Leave tp, pp and cp out, and to classify dp too."
        )
    form: Weights | Products = weights
    if weights == "auto" and plan.products != "plain":
        form = plan.products
    source = model if isinstance(model, nn.Module) else local_weights(model)
    folder = source if isinstance(source, Path) else None
    settings = settings_in(folder) if folder else {}
    module, labels, whole = _read(source, settings, only)
    if tokenizer is None and folder:
        tokenizer = found_in(folder)
    module = (_only_classifying(module) if classifies else module).eval()
    elements = sum(each.numel() for each in module.parameters())
    if not dims.alone:
        config: Any = module.config
        require_inference(plan, config, weights=weights, shortlist=bool(shortlist))
    start, ends = _marks(settings, tokenizer)
    setup = Setup(
        purpose=INFERENCE, plan=plan, numerics=numerics_of(plan), device=torch.device(device), weights=form,
        rounded=rounded_weights(folder) if folder and form == "auto" else {},
        loaded=folder is not None, exact_outputs=exact_outputs, slots=slots, companion=companion,
        shortlist=(*shortlist, *ends) if shortlist else (),
        dims=ALONE if _is_shared_out(module, dims) else dims,
    )  # fmt: skip
    module = apply(module, setup)
    names, white = settings.get("id2label") or {}, settings.get("image_range")
    each = next(module.parameters()).element_size()
    return Loaded(
        model=module, tokenizer=tokenizer, start=start, ends=ends,
        pooled_first=_pooled_first(folder) if folder else False,
        usual=_usual(folder, dims) if folder and module.graph.generates else {}, labels=labels,
        classes=tuple(str(names[key]) for key in sorted(names, key=int)) if isinstance(names, dict) else (),
        languages=tuple(map(str, settings.get("languages") or ())),
        white=float(white) if isinstance(white, int | float) else None,
        whole_bytes=(whole or elements) * each, bytes=elements * each,
    )  # fmt: skip


def _read(
    model: Path | nn.Module, settings: dict[str, Any], only: Sequence[str]
) -> tuple[Any, TextLabels, int]:
    """An open model, or the model in a folder, with the experts of the labels `only`, if there are any; its labels;
    and the number of elements of all weights in the folder if only some were read, else 0."""
    if isinstance(model, nn.Module):
        if only:
            raise ConfigError(
                "The model is open already, with all its experts; give the folder of its export, from which only "
                "some labels' experts can be read."
            )
        return model, labels_of(cast(Any, model).graph, settings), 0
    if not only:
        module = from_pretrained(model)
        return module, labels_of(module.graph, settings), 0
    if rounded_weights(model):
        raise ConfigError(
            "The folder's linear layers are quantised, so that all labels' experts are read together; leave the "
            "labels out."
        )
    every = labels_of(read_config(model).graph, settings)
    numbers = every.among(only)
    labels = replace(every, names=tuple(every.names[number] for number in numbers))
    held = plain_state(described(model)).values()
    elements = sum(each.numel() for each in held if each.is_floating_point())
    return from_pretrained(model, labels=numbers), labels, elements


def _usual(folder: Path, dims: ParallelDims) -> Mapping[str, Any]:
    """The fields of `Decoding` that a folder sets; warns of its settings that are not applied."""
    defaults = usual_of(folder)
    if defaults.unmet and dims.main:
        words = quoted("; ".join(defaults.unmet), 600)
        _log.warning("generation_config.json has settings that are not applied: %s.", words)
    return defaults.fields


def _only_classifying(model: Any) -> Any:
    """The model with only its classification head, and without parts that only other heads need."""
    if model.graph.classes is None or len(model.graph.heads) == 1:
        return model
    first, state = next(model.parameters()), model.state_dict()
    part = create(model.config.telling(), device=first.device, dtype=first.dtype)
    part.load_state_dict({name: state[name] for name in part.state_dict()})
    return part


def _is_shared_out(module: nn.Module, dims: ParallelDims) -> bool:
    """Whether a model is already sharded over ranks. Raises ConfigError if its sharding differs from `dims`."""
    if dims.alone:
        return False
    split, cut_up = line_of(module) is not None, stages_of(module) is not None
    hosted = rounds_of(module) is not None
    if sharded(module) or (split and dims.tp == 1) or (cut_up and dims.pp == 1) or (hosted and dims.ep == 1):
        raise ConfigError(
            "The model's weights are sharded in another way than the plan asks for; give the folder of its export."
        )
    return split or cut_up or hosted


def _marks(settings: dict[str, Any], tokenizer: Tokenizer | None) -> tuple[int | None, tuple[int, ...]]:
    start, ends = first_token(settings), settings.get("eos_token_id")
    if tokenizer is not None:
        start = start if start is not None else tokenizer.start
        ends = ends if ends is not None else tokenizer.end
    every = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
    return start, every


def _pooled_first(folder: Path) -> bool:
    """Whether a text's vector is its first token's, not the mean, according to sentence-transformers' file in a
    folder."""
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return False
    settings = read_json(file)
    modes = {name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True}
    if not modes <= {"pooling_mode_cls_token", "pooling_mode_mean_tokens"} or len(modes) > 1:
        raise ConfigError(
            f"{file} asks for {', '.join(sorted(modes))}; only the mean of tokens and the first token are supported."
        )
    return "pooling_mode_cls_token" in modes
