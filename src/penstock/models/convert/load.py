"""Loading weights of any known naming into a model, with every difference reported."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from penstock.boundary.hub import local_weights
from penstock.config.graph import part_of
from penstock.config.model import ModelConfig, ViTConfig, stacks
from penstock.config.theirs.backbones import backbone_in
from penstock.errors import ConfigError, PenstockError
from penstock.models import create
from penstock.models.anatomy import WHOLE
from penstock.models.convert.files import described, read_state_dict, settings_in
from penstock.models.convert.names import misfit, respelled, text_from_hf
from penstock.models.convert.upcycle import Upcycling, dense_twin, require_copies, upcycled
from penstock.models.convert.vit import POSITIONS, from_hf, from_timm, resize_positions
from penstock.models.former_names import renamed
from penstock.models.frozen import plain_places
from penstock.models.lora import without_adapters
from penstock.models.model import Model
from penstock.models.rounded import CLIP, clip_of, plain_state, rounded_in
from penstock.planner.describe import totals

log = logging.getLogger(__name__)

Names = Literal["penstock", "hf", "timm"]

# Parts of transformers' models that a classifier does not have: they are reported and left out.
_IGNORED = re.compile(
    r"(vit\.)?(pooler|decoder)\.|(vit\.)?embeddings\.(mask_token|position_ids)$|text_model\.|(text|visual)_projection\."
    r"|logit_(scale|bias)$|head\.(probe$|attention\.|layernorm\.|mlp\.)|post_layernorm\."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The result of `load_weights`."""

    names: Names
    """The library whose names the weights had."""
    resized_from: int | None = None
    """Number of tokens that the positions were trained for, if they were interpolated."""
    drawn: tuple[str, ...] = ()
    """Parameters left at the model's own initialisation: the head, if that was allowed."""
    ignored: tuple[str, ...] = ()
    """Weights that were left out, because a classifier does not need them."""
    upcycled: bool = False
    """Whether dense weights were turned into mixtures of experts."""

    def __str__(self) -> str:
        library = {"penstock": "Penstock", "hf": "transformers", "timm": "timm"}[self.names]
        notes = {
            "experts start as copies of the dense weights": self.upcycled,
            f"positions of {self.resized_from} tokens were interpolated": self.resized_from is not None,
            f"initialised at random: {', '.join(self.drawn)}": self.drawn,
            f"left out: {_some(self.ignored)}": self.ignored,
        }
        return "; ".join(
            [f"weights in the names of {library}", *(note for note, holds in notes.items() if holds)]
        )


def load_weights(
    model: nn.Module, source: str | Path | Mapping[str, Tensor], *, new_head: bool = False,
    upcycling: Upcycling | None = None,
) -> Loaded:  # fmt: skip
    """Load a safetensors file, a Hugging Face folder, or a state dict into `model`, in place.

    For Penstock's ViT the names may be its own, transformers' or timm's; positions learned at another image size are
    interpolated. `new_head` leaves the head as it is if the weights have none or one of another size: for fine-tuning.
    Text models accept their own names or transformers', with or without a head. Any other model accepts its own names
    only. Adapters are not changed; quantised linears round the weights that they are given. With `upcycling`, dense
    weights fill a model with mixtures. Raises ConfigError that lists all weights that are missing, left over or of
    another shape, and CheckpointError for a file that cannot be read.
    """
    if any(p.is_meta for p in model.parameters()):
        raise ConfigError(
            "Weights cannot be loaded into a model on the meta device; call model.to_empty(device=…) and "
            "model.init_weights() first."
        )
    with without_adapters(model):
        with _without_clips(model) as clips, plain_places(model):
            state, loaded, scales = _fitting(model, source, new_head, upcycling)
        if clips:
            held = model.state_dict()  # for a pipeline stage, its own weights only
            starts = {f"{name}.{CLIP}": clip_of(scales[name]) for name in clips & scales.keys()}
            state = held | state | {name: start for name, start in starts.items() if name in held}
        if loaded.ignored:
            ahead = any(".eh_proj." in name for name in loaded.ignored)
            also = " With these the checkpoint predicts further tokens than the next." if ahead else ""
            log.info("Left out, because the model does not need them: %s.%s", _some(loaded.ignored), also)
        with torch.no_grad():
            model.load_state_dict(state)
        return loaded


@contextmanager
def _without_clips(model: nn.Module) -> Iterator[set[str]]:
    """Inside, the model lacks the clips that its linears learn; yields the names of these linears."""
    held = {
        name: (module, module._parameters.pop(CLIP))
        for name, module in model.named_modules()
        if CLIP in module._parameters
    }
    try:
        yield set(held)
    finally:
        for module, clip in held.values():
            module._parameters[CLIP] = clip


def _fitting(
    model: nn.Module, source: str | Path | Mapping[str, Tensor], new_head: bool, upcycling: Upcycling | None
) -> tuple[dict[str, Tensor], Loaded, dict[str, Tensor]]:
    """The state dict to load into a model, the report, and the input scales of the linears for which one is stored."""
    # A pipeline stage has the names of the whole model, and some of its weights.
    whole = create(cast(Any, model).config, device="meta") if WHOLE in model.__dict__ else model
    model_type = None
    if isinstance(source, str | Path):
        source = local_weights(source)
        require_fitting(whole, source, new_head=new_head, upcycling=upcycling)  # before anything is read
        state: Mapping[str, Tensor] = read_state_dict(source)
        model_type = settings_in(source).get("model_type")
    else:
        state = source
    scales = {name: one.input_scale for name, one in rounded_in(state).items() if one.input_scale is not None}
    state, loaded = fitted(whole, state, new_head, model_type, upcycling)
    if whole is not model:  # other ranks' weights, and those left at their initialisation, are not changed
        held = model.state_dict()
        state = held | {name: value for name, value in state.items() if name in held and not value.is_meta}
    return dict(state), loaded, scales


def require_fitting(
    model: nn.Module, source: Path, *, new_head: bool = False, upcycling: Upcycling | None = None
) -> None:
    """Refuse weights that do not fit the model, from the headers of their files. The model may be on the meta device.

    Raises as `load_weights`.
    """
    fitted(model, described(source), new_head, settings_in(source).get("model_type"), upcycling)


def fitted(
    model: nn.Module, given: Mapping[str, Tensor], new_head: bool = False, model_type: Any = None,
    upcycling: Upcycling | None = None,
) -> tuple[dict[str, Tensor], Loaded]:  # fmt: skip
    """Convert the weights `given` to the names and shapes of `model`, if all fit; quantised weights become values.
    Tensors and model may be on the meta device. `model_type` is the entry of the weights' config.json. Raises
    ConfigError as `load_weights`.
    """
    given = plain_state(given)
    mixed = isinstance(model, Model) and any(run.stack.experts for run in model.graph.runs)
    if not mixed:
        return _fitted(model, given, new_head, model_type)
    config = cast(Any, model).config
    try:
        return _fitted(model, given, new_head, model_type)
    except ConfigError as error:
        try:
            dense, loaded = _fitted(create(dense_twin(config), device="meta"), given, new_head, model_type)
        except ConfigError:
            raise error from None  # they are not dense weights for this model either
    if upcycling is None:
        raise ConfigError(
            "The weights are dense, but the model has experts; pass upcycling=Upcycling() of "
            "penstock.models.convert.upcycle to start each expert as a copy of the perceptron, or of the block."
        )
    require_copies(config)
    dense = {name: tensor for name, tensor in dense.items() if name not in loaded.drawn}
    return upcycled(dense, model.state_dict(), config, upcycling), replace(loaded, upcycled=True)


def _fitted(
    model: nn.Module, given: Mapping[str, Tensor], new_head: bool, model_type: Any
) -> tuple[dict[str, Tensor], Loaded]:
    state, expected = renamed(dict(given), model), model.state_dict()
    if isinstance(model, Model) and not model.graph.vision:
        return _fitted_text(model, state, new_head, model_type)
    if not isinstance(model, Model) or not isinstance(model.config, ViTConfig):
        _check(expected, state, ())
        return state, Loaded(names="penstock")
    names, kind, misfits = _names_of(state), backbone_in(state), dict[str, str]()
    if names != "penstock":
        state, misfits, _ = (from_hf if names == "hf" else from_timm)(state, model.config)
    ignored = tuple(name for name in state if _IGNORED.match(name))
    state = {name: tensor for name, tensor in state.items() if name not in ignored}
    # Interpolate as the weights' own library does, so that the results agree with it.
    antialias = names != "hf" or (kind is not None and kind.antialias)
    state, resized_from = _resized(state, misfits, model.config, antialias=antialias)
    drawn: tuple[str, ...] = ()
    head = tuple(name for name in expected if name.startswith(("head.", "distil_head.")))
    if new_head:
        fits = all(name in state and not misfit(name, state[name], expected[name]) for name in head)
        drawn = () if fits else head
        state |= {name: expected[name] for name in drawn}
    _check(expected, state, head, misfits)
    return state, Loaded(names=names, resized_from=resized_from, drawn=drawn, ignored=ignored)


def require_as_large(
    config: ModelConfig, elements: int, where: str, *, error: type[PenstockError] = ConfigError,
    remedy: str = "Use the configuration that the weights were trained with.",
) -> None:  # fmt: skip
    """Refuse a model with more parameters than its weights can fill, which have `elements` in all. This is checked
    before the model is created, because a wrong digit in a configuration could use up all memory. Raises `error`.
    `where` names the configuration.
    """
    needed = totals(config).parameters
    # Positions may be trained on another grid. They are interpolated to at most eight times as many per side.
    positions = config.tokens * config.width if isinstance(config, ViTConfig) else 0
    # A text model may share a table that is counted twice.
    if needed - positions > elements * (1 if positions else 2) or positions > 64 * elements:
        sizes = ", ".join(f"{each.depth} blocks of width {each.width:,}" for each in stacks(config))
        raise error(
            f"{where} describes a model of {needed:,} parameters ({sizes}), but its weights have {elements:,} "
            f"elements. {remedy}"
        )


_OUR_HEADS = ("head.", "pooler.", "transform.")
_THEIR_HEADS = (
    "cls.", "classifier.", "lm_head.", "score.", "bert.pooler.", "head.", "decoder.weight", "decoder.bias",
)  # fmt: skip


def _fitted_text(
    model: Model, state: dict[str, Tensor], new_head: bool, model_type: Any
) -> tuple[dict[str, Tensor], Loaded]:
    expected, ignored, misfits = model.state_dict(), tuple[str, ...](), dict[str, str]()
    own = any(f"{run.name}.blocks.0.norm2.weight" in state for run in model.graph.runs)
    names: Names = "penstock" if own or "tokens.weight" in state else "hf"
    if names == "hf":
        converted, free = text_from_hf(respelled(state, model_type), model)
        state, misfits = converted.state, converted.misfits
        # Layers that prepared features for another head are of no use to a new head.
        other = tuple(name for name in converted.left if new_head and name.startswith(_THEIR_HEADS))
        ignored = (*free, *other)
        state |= dict.fromkeys((name for name in converted.left if name not in other), torch.empty(0))
    else:
        state = _with_tied(state, model)
    # Layers that turn features into outputs, and may be trained from scratch.
    parts = (part_of(each, part) for each in model.graph.heads for part in ("", "pooler", "transform"))
    heads = (*_OUR_HEADS, *(f"{part.removesuffix('_')}." for part in parts if part))
    head = tuple(name for name in expected if name.startswith(heads))
    drawn: tuple[str, ...] = ()
    if new_head:
        # If the weights have several branches, those that this model lacks are left out, with their heads.
        there = {name.partition(".")[0] for name in expected}
        branches = len(model.graph.runs) > 1 and there & {name.partition(".")[0] for name in state}
        left = (name for name in state if name not in expected)
        ignored += tuple(
            name
            for name in left
            if name.startswith(heads) or (branches and name.partition(".")[0] not in there)
        )
        state = {name: tensor for name, tensor in state.items() if name not in ignored}
        state = _with_tied(state, model)
        drawn = tuple(n for n in head if n not in state or misfit(n, state[n], expected[n]))
        state |= {name: expected[name] for name in drawn}
    _check(expected, state, head, misfits)
    return state, Loaded(names=names, drawn=drawn, ignored=ignored)


def _with_tied(state: dict[str, Tensor], model: Model) -> dict[str, Tensor]:
    """The state with the weights of tied heads added, which are the tables of tokens."""
    return state | {head: state[table] for head, table in model.graph.tied.items() if table in state}


def _names_of(state: Mapping[str, Tensor]) -> Names:
    """The library whose names a ViT's state dict has. Raises ConfigError for unknown names."""
    if "patch_embed.proj.weight" in state:
        return "timm"
    stem = re.compile(r"embeddings\.patch_embeddings?(\.projection)?\.weight$")
    if any(stem.search(name) for name in state):
        return "hf"
    if POSITIONS in state or "stem.proj.weight" in state:
        return "penstock"
    first = ", ".join(sorted(state)[:3]) or "none"
    raise ConfigError(
        f"The names of these weights are of no known Vision Transformer (the first are: {first}); use weights of "
        f"Penstock, of transformers' ViT or of timm's VisionTransformer."
    )


def _resized(
    state: dict[str, Tensor], misfits: Mapping[str, str], config: ViTConfig, *, antialias: bool
) -> tuple[dict[str, Tensor], int | None]:
    token, there = config.has_class_token, state.keys() | misfits.keys()
    if ("class_token" in there) != token:
        has, lacks = ("no class token", "has one") if token else ("a class token", "has none")
        other = "pooled" if token else "token"
        raise ConfigError(
            f"The weights have {has}, but a model with model.classifier {config.classifier!r} {lacks}; "
            f"set model.classifier to {other!r}."
        )
    if bool(there & {"distil_token", "dist_token"}) != config.distilled:
        has, other = ("no", "false") if config.distilled else ("a", "true")
        raise ConfigError(
            f"The weights have {has} distillation token, but model.distilled is {str(config.distilled).lower()}; set "
            f"it to {other}."
        )
    positions = state.get(POSITIONS)
    if positions is None or positions.ndim != 2 or positions.shape[1] != config.width:
        return state, None  # `_check` says so
    if positions.shape[0] == (rows := config.graph.runs[0].rows):
        return state, None
    resized = resize_positions(positions, rows, learned=token + config.distilled, antialias=antialias)
    return state | {POSITIONS: resized}, positions.shape[0]


def _check(
    expected: Mapping[str, Tensor], state: Mapping[str, Tensor], head: tuple[str, ...],
    misfits: Mapping[str, str] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Raise one error that lists every name, shape and type that does not fit; `misfits` are known ones not in
    `state`."""
    problems = []
    missing = [name for name in expected if name not in state and name not in misfits]
    if missing:
        problems.append(f"The weights lack {_some(missing)}.")
    extra = [name for name in state if name not in expected]
    if extra:
        problems.append(f"The model has no place for {_some(extra)}.")
    unfit = {name: misfit(name, state[name], tensor) for name, tensor in expected.items() if name in state}
    odd = {name: sentence for name, sentence in {**misfits, **unfit}.items() if sentence}
    sentences = list(dict.fromkeys(odd.values()))  # report tied weights once
    problems += sentences[:4]
    if len(sentences) > 4:
        problems.append(f"{len(sentences) - 4} more have other shapes or types than the model's.")
    if not problems:
        return
    if head and {*missing, *odd} <= set(head) and not extra:
        problems.append("Train a head with `penstock train --from`, or in Python with new_head=True.")
    else:
        problems.append("Build the model with the configuration that the weights were trained with.")
    raise ConfigError(problems)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
