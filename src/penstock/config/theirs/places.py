"""Conversion of rotary positions and windows between transformers' config.json and our fields."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast

from penstock.config.convert import Count, Natural, NotNegative, Positive, PositiveShare, Range, shown_value
from penstock.config.layer import Rotary, Scaling, unscaled
from penstock.config.theirs.library import Library, WindowTurns, global_turns


@dataclass(frozen=True, kw_only=True)
class _Rope:
    """Rotary positions of a config.json."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Annotated[float, Range(1, 1 << 20)] | None = None
    original_max_position_embeddings: Count | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: NotNegative | None = None
    mscale: NotNegative | None = None
    mscale_all_dim: NotNegative | None = None
    truncate: bool | None = None
    partial_rotary_factor: PositiveShare | None = None
    short_factor: tuple[Positive, ...] | None = None
    long_factor: tuple[Positive, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class _Ropes:
    """Rotary options of blocks that attend to all tokens, and of blocks with a window."""

    full_attention: _Rope | None = None
    sliding_attention: _Rope | None = None


_PLAIN = Rotary()
_SCALINGS: dict[str, dict[str, tuple[str, float]]] = {
    "linear": {}, "longrope": {},
    "llama3": {"low": ("low_freq_factor", 1.0), "high": ("high_freq_factor", 4.0)},
    "yarn": {
        "low": ("beta_slow", 1.0), "high": ("beta_fast", 32.0), "mscale": ("mscale", 0.0),
        "mscale_all": ("mscale_all_dim", 0.0),
    },
}  # fmt: skip
"""For each rope_type, our fields besides the factor, with transformers' names and defaults."""
_TURNING: dict[str, tuple[Any, Any]] = {
    "rope_theta": (Positive | None, None),
    "rope_scaling": (_Rope | None, None),
    "rope_parameters": (_Rope | None, None),
}
"""Options of libraries with rotary positions."""
_PARTIAL: dict[str, tuple[Any, Any]] = {
    "partial_rotary_factor": (PositiveShare | None, None),
    "original_max_position_embeddings": (Count | None, None),
}
"""Options of libraries whose positions may rotate a share of the features, or be scaled by pair."""
_UNTURNED: dict[str, tuple[Any, Any]] = {
    "no_rope_layers": (tuple[Natural, ...] | None, None),
    "no_rope_layer_interval": (Count, 4),
}
"""Options of libraries that have blocks without positions."""
_WINDOWED: dict[str, tuple[Any, Any]] = {
    "use_sliding_window": (bool | None, None),
    "sliding_window": (Count | None, None),
    "max_window_layers": (Natural | None, None),
    "layer_types": (tuple[Literal["full_attention", "sliding_attention"], ...] | None, None),
}
"""Options of libraries where a flag turns windows on."""
_WINDOW: dict[str, tuple[Any, Any]] = {"sliding_window": (Count | None, 4096)}
"""Options of libraries whose blocks always have a window, or where they have one if it is given."""


def options_of(library: Library) -> dict[str, tuple[Any, Any]]:
    """The options for positions and windows in a config.json of this library, each with its type and default."""
    if isinstance(turns := library.window, WindowTurns):
        kinds: list[tuple[Any, tuple[str, Any]]] = [(Count, turns.window), (Count, turns.every)]
        kinds += [(Positive, turns.base), (Positive, turns.near_base)]
        kinds += [(Count, turns.scale)] if turns.scale else []
        own = {name: (kind, default) for kind, (name, default) in kinds if name}
        both = {"rope_scaling": _TURNING["rope_scaling"], "rope_parameters": (_Ropes | None, None)}
        return {**own, **(_TURNING if library.rotary else both), "layer_types": _WINDOWED["layer_types"]}
    given = {"sliding_window": (Count | None, None)}
    windowed = {"flagged": _WINDOWED, "always": _WINDOW, "given": given}.get(str(library.window), {})
    turning = (_TURNING if library.rotary else {}) | (_PARTIAL if library.partial else {})
    return turning | (_UNTURNED if library.unturned else {}) | windowed


def read_places(given: Any, library: Library, problems: list[str]) -> dict[str, Any]:
    """Our fields for the options `given`; contradictions are added to `problems`."""
    if isinstance(library.window, WindowTurns):
        return _by_turns(given, library, library.window, problems)
    if not library.rotary:
        return {}
    settings: dict[str, Any] = {"rotary": _rotary(given, library, problems)}
    if library.unturned:
        settings["unturned_every"] = _unturned(given, problems)
    if library.window in ("always", "given"):
        settings["window"] = given.sliding_window
    elif library.window == "flagged" and given.use_sliding_window:
        settings["window"] = _window(given, problems)
    elif library.window == "flagged" and "sliding_attention" in (given.layer_types or ()):
        problems.append(
            "config.json has sliding_attention among layer_types, but no use_sliding_window true, without which "
            "transformers has no window; set it to true, or remove layer_types."
        )
    return settings


def _rotary(config: Any, library: Library, problems: list[str]) -> Rotary:
    """Rotary positions as transformers writes them: rope_theta and rope_scaling (version 4), or rope_parameters (5)."""
    base: Any = library.base
    given = config.rope_parameters or config.rope_scaling
    share, theta = base.rotary.share, config.rope_theta or base.rotary.base
    if given is None and base.rotary.scaling != "none":
        usual: Rotary = replace(base.rotary, base=theta)
        return usual
    given = given or _Rope()
    trained = given.original_max_position_embeddings
    if library.partial:
        share = given.partial_rotary_factor or config.partial_rotary_factor or share
        trained = trained or config.original_max_position_embeddings
    given = replace(given, original_max_position_embeddings=trained)
    like = Rotary(share=share, interleaved=base.rotary.interleaved)
    scaled = base.latent is not None
    return _turning(given, theta, config.max_position_embeddings, problems, like, scaled=scaled)


def _unturned(given: Any, problems: list[str]) -> int:
    """The interval of blocks without rotary positions."""
    depth, every = given.num_hidden_layers, given.no_rope_layer_interval
    turned = [i % every < every - 1 for i in range(depth)]
    if given.no_rope_layers is not None:
        turned = [one > 0 for one in given.no_rope_layers[:depth]]
        every = turned.index(False) + 1 if False in turned else 0
    if turned != [not every or i % every < every - 1 for i in range(depth)]:
        problems.append(
            "config.json has no_rope_layers in no regular turn, or too few, but Penstock reads models in which every "
            "n-th block has no rotary positions."
        )
    return every if False in turned else 0


def _turning(
    given: _Rope, base: float, positions: int, problems: list[str], like: Rotary = _PLAIN, *, scaled: bool = False
) -> Rotary:  # fmt: skip
    """`base`, `positions` and the rest of `like` apply where the record has no entry; `scaled` models have factors of
    scores."""
    plain = replace(like, base=given.rope_theta or base)
    kind = given.rope_type or given.type or "default"
    kind = "longrope" if kind == "su" else kind
    same: dict[str, tuple[Any, ...]] = {
        "attention_factor": (None,), "mscale": (None,), "mscale_all_dim": (None,),
        "partial_rotary_factor": (None, like.share),
    }  # fmt: skip
    if scaled and kind == "yarn":
        del same["mscale"], same["mscale_all_dim"]
    problems += [
        f"config.json has {name} {getattr(given, name)!r} for its rotary positions, which Penstock's do not have."
        for name, allowed in same.items()
        if getattr(given, name) not in allowed
    ]
    trained = given.original_max_position_embeddings or positions
    needed: tuple[str, ...] = ("short_factor", "long_factor") if kind == "longrope" else ("factor",)
    if kind == "default":
        return plain
    if kind not in _SCALINGS:
        problems.append(
            f"config.json has rope_type {shown_value(kind)}; Penstock's rotary positions have default, linear, llama3, "
            "yarn and longrope."
        )
        return plain
    if lacks := [name for name in needed if not getattr(given, name)]:
        problems.append(f"config.json has rope_type {kind!r} without its {' and '.join(lacks)}; add it.")
        return plain
    if kind == "longrope":
        return replace(
            plain, scaling="longrope", factor=given.factor or max(1.0, positions / trained), trained=trained,
            short=given.short_factor or (), long=given.long_factor or (),
        )  # fmt: skip
    fields: dict[str, Any] = {
        name: getattr(given, option) or default for name, (option, default) in _SCALINGS[kind].items()
    }
    return replace(
        plain, scaling=cast(Scaling, kind), factor=given.factor or 1.0,
        trained=trained if kind != "linear" else Rotary.trained,
        truncate=kind != "yarn" or given.truncate is not False, **fields,
    )  # fmt: skip


def _window(given: Any, problems: list[str]) -> int | None:
    """The window that all blocks have."""
    depth = given.num_hidden_layers
    first = depth if given.max_window_layers is None else given.max_window_layers
    kinds = given.layer_types or [
        "full_attention" if i < first else "sliding_attention" for i in range(depth)
    ]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) == {"sliding_attention"}:
        return cast(int | None, given.sliding_window)
    problems.append(
        "config.json has use_sliding_window with layer_types of both kinds, but Penstock reads models that have the "
        "window in all blocks, or in none."
    )
    return None


def _by_turns(given: Any, library: Library, turns: WindowTurns, problems: list[str]) -> dict[str, Any]:
    """Which blocks have a window, rotary positions of both kinds, and the scale of scores."""
    if library.rotary:
        rotary = near = _rotary(given, library, problems)
    else:
        ropes, length = given.rope_parameters or _Ropes(), given.max_position_embeddings
        bases = getattr(given, turns.base[0]), getattr(given, turns.near_base[0])
        rotary = _turning(ropes.full_attention or given.rope_scaling or _Rope(), bases[0], length, problems)
        near = _turning(ropes.sliding_attention or _Rope(), bases[1], length, problems)
    if near not in (replace(rotary, base=near.base), unscaled(rotary, near.base)):
        problems.append(
            "config.json scales the rotary positions of blocks with a window in a way of their own; Penstock's are "
            "scaled as in the other blocks, or not at all."
        )
    depth, every = given.num_hidden_layers, getattr(given, turns.every[0], turns.every[1])
    offset = every - 1 if turns.global_last else 0
    kinds = given.layer_types or tuple(_kind(i % every != offset) for i in range(depth))
    settings: dict[str, Any] = {"rotary": rotary, "window": None}
    if turns.scale is not None:
        settings["attention_scale"] = getattr(given, turns.scale[0]) ** -0.5
    if "sliding_attention" not in kinds:
        return settings
    regular = global_turns([kind == "sliding_attention" for kind in kinds])
    every, offset = regular.values()
    if kinds != tuple(_kind(not every or i % every != offset) for i in range(depth)):
        problems.append(
            "config.json has layer_types in no regular turn, but Penstock reads models in which every n-th block has "
            "full_attention."
        )
    settings |= {"window_base": None if near.base == rotary.base else near.base}
    settings |= {"window_scaled": near.scaling == rotary.scaling}
    return {**settings, **regular, "window": getattr(given, turns.window[0])}


def _kind(windowed: bool) -> str:
    return "sliding_attention" if windowed else "full_attention"


def written_places(stack: Any, library: Library) -> dict[str, Any]:
    """The entries for a stack's positions and windows in a config.json of this library."""
    if isinstance(library.window, WindowTurns):
        return _written_by_turns(stack, library, library.window)
    if not library.rotary:
        return {}
    values = _written_rotary(stack.rotary, library)
    if library.partial:
        values["partial_rotary_factor"] = stack.rotary.share
    if library.unturned:
        values["no_rope_layers"] = [int(layer.turned) for layer in stack.layers]
        values["no_rope_layer_interval"] = stack.unturned_every or stack.depth + 1
    if library.window in ("always", "given"):
        values["sliding_window"] = stack.window
    elif library.window == "flagged" and stack.window is not None:
        kinds = [_kind(True)] * stack.depth
        values |= {"use_sliding_window": True, "sliding_window": stack.window, "layer_types": kinds}
        values["max_window_layers"] = 0
    return values


def _written_by_turns(stack: Any, library: Library, turns: WindowTurns) -> dict[str, Any]:
    """The entries in the form of transformers 5, with those that version 4 reads."""
    values: dict[str, Any] = {
        turns.window[0]: stack.window or turns.window[1],
        "layer_types": [_kind(layer.window > 0) for layer in stack.layers],
    }  # fmt: skip
    if turns.scale is not None:
        values[turns.scale[0]] = round((stack.attention_scale or stack.layers[0].head_width ** -0.5) ** -2)
    if library.rotary:
        return {**values, **_written_rotary(stack.rotary, library)}
    base = stack.window_base or stack.rotary.base
    near = replace(stack.rotary, base=base) if stack.window_scaled else unscaled(stack.rotary, base)
    ropes = {}
    for kind, rotary in (("full_attention", stack.rotary), ("sliding_attention", near)):
        written = _written_rotary(rotary, library)
        ropes[kind] = {"rope_type": "default", **written.pop("rope_scaling", {}), **written}
    every = max(1, stack.global_every if stack.window else 1)
    bases = {turns.base[0]: stack.rotary.base, turns.near_base[0]: near.base}
    return {**values, turns.every[0]: every, "rope_parameters": ropes, **bases}


def _written_rotary(rotary: Rotary, library: Library) -> dict[str, Any]:
    base: Any = library.base
    values: dict[str, Any] = {"rope_theta": rotary.base}
    if rotary.scaling == "none":
        scales = library.rotary and base.rotary.scaling != "none"  # if nothing is given
        return {**values, "rope_scaling": {"rope_type": "default"}} if scales else values
    if rotary.scaling == "longrope":  # in no more entries: version 4 of transformers refuses others
        pairs = {"short_factor": list(rotary.short), "long_factor": list(rotary.long)}
        values["rope_scaling"] = {"type": "longrope", **pairs}
        values["original_max_position_embeddings"] = rotary.trained
        return {**values, "max_position_embeddings": round(rotary.factor * rotary.trained)}
    scaling: dict[str, Any] = {"rope_type": rotary.scaling, "factor": rotary.factor}
    if rotary.scaling != "linear":
        scaling["original_max_position_embeddings"] = rotary.trained
    if not rotary.truncate:
        scaling["truncate"] = False
    names = ((name, option) for name, (option, _) in _SCALINGS[rotary.scaling].items())
    scaling |= {option: value for name, option in names if (value := getattr(rotary, name))}
    return {**values, "rope_scaling": scaling}
