"""Names of weights in transformers' text models, by the tables of `presets/weights.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.config.model import Seq2SeqConfig, TextConfig, ViTConfig
from penstock.config.shipped import read_shipped, with_forms
from penstock.config.stack import Stack


@dataclass(frozen=True, slots=True)
class WeightPlaces:
    """Place of the weights of one of our modules in transformers' model."""

    names: tuple[str, ...]
    """Names of modules, or of parameters if ours is a parameter."""
    form: Literal["same", "heads", "rows", "experts", "turns", "units"] = "same"
    """`heads`: queries, keys and values, which we order by head; `rows`: one after the other; `experts`: the same for
    each expert `{e}`, stacked along our first dimension; `turns`: all experts in one tensor, whose outputs alternate
    between gate and input; `units`: floats, which we store as integer multiples of `UNIT`."""
    transposed: bool = False
    """Whether weights are stored as (in, out), of experts as (E, in, out)."""
    unused: int = 0
    """Rows at the start of a table of positions that are never read."""
    shape: tuple[int, ...] = ()
    """The shape in transformers' model if it differs from ours; −1 is the remaining size."""


Names = Mapping[str, WeightPlaces]


def names_of(library: str, config: TextConfig) -> Names:
    """The places of a model's weights, from the table `library` in `presets/weights.toml`."""
    tables = read_shipped("weights")
    table = with_forms(tables[library], tables)
    parts = ("blocks", "cross", "place", "perceptron", "mixtures", "tied", "classes")
    blocks, cross, place, perceptron, mixtures, tied, classes = (table.pop(part, None) for part in parts)
    if getattr(config, "head", "") == "classes":
        table |= classes or {}
        if tied is not None:
            del table["head.bias"]
    elif config.tied:
        table |= tied or {}
    places: dict[str, WeightPlaces] = {}
    for side in ("encoder", "decoder") if isinstance(config, Seq2SeqConfig) else (config.graph.runs[0].name,):
        stack, words = stack_of(config, side), {"side": side, "last": 2 if side == "decoder" else 1}
        places |= {name.replace("{side}", side): _filled(value, "", words) for name, value in table.items()}
        entries = {**blocks, **(cross if side == "decoder" and cross else {})}
        if stack.latent is not None and not stack.latent.query_rank:
            entries["attention.q_up"] = "self_attn.q_proj"
        if perceptron is not None:
            gated = stack.layers[0].perceptron.gated
            up = ("wi_0", "wi_1") if gated else ("wi",)
            entries["mlp.up"] = {
                "names": [perceptron + name for name in up],
                "form": "rows" if gated else "same",
            }
            entries["mlp.down"] = perceptron + "wo"
        places |= {
            f"{side}.blocks.{{i}}.{name}": _filled(value, place, words) for name, value in entries.items()
        }
        for number, layer in enumerate(stack.layers):
            if mixtures is not None and layer.mixture:
                here, expert = {**words, "i": number}, mixtures["expert"]
                kinds = {
                    "router": mixtures["router"],
                    "up": {"names": [expert + name for name in mixtures["up"]], "form": "experts"},
                    "down": {"names": [expert + mixtures["down"]], "form": "experts"},
                }
                prefix = f"{side}.blocks.{number}.mlp."
                places |= {prefix + name: _filled(value, place, here) for name, value in kinds.items()}
    return places


def _filled(value: Any, place: str, words: Mapping[str, Any]) -> WeightPlaces:
    """An entry of a table, prefixed by `place` in transformers' model, with the words in braces filled in."""
    entry: dict[str, Any] = {"names": [value]} if isinstance(value, str) else dict(value)
    names = [place + name for name in entry.pop("names")]
    for word, filled in words.items():
        names = [name.replace(f"{{{word}}}", str(filled)) for name in names]
    return WeightPlaces(tuple(names), shape=tuple(entry.pop("shape", ())), **entry)


def stack_of(config: TextConfig | ViTConfig, name: str) -> Stack:
    """The stack of a model by its name: `encoder` or `decoder`."""
    stack: Stack = getattr(config, name) if isinstance(config, Seq2SeqConfig) else config
    return stack
