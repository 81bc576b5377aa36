"""Weights under other names than those of the tables in `names`: older files, and models that compute what another of
transformers' models does, under names of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from penstock.config.theirs.text import library_of

_OLD = ((r"\bLayerNorm\.gamma$", "LayerNorm.weight"), (r"\bLayerNorm\.beta$", "LayerNorm.bias"))
"""TensorFlow's names of a norm's weights, which the first BERTs on the hub have, too."""
_WORDS = "cls.predictions."
_ROBERTA = (
    (r"^roberta\.", "bert."),
    (r"^lm_head\.dense\.", _WORDS + "transform.dense."),
    (r"^lm_head\.layer_norm\.", _WORDS + "transform.LayerNorm."),
    (r"^lm_head\.decoder\.", _WORDS + "decoder."),
    (r"^lm_head\.bias$", _WORDS + "bias"),
    (r"^classifier\.dense\.", "bert.pooler.dense."),
    (r"^classifier\.out_proj\.", "classifier."),
)
_DISTILLED = (
    (r"^(distilbert\.)?embeddings\.", "bert.embeddings."),
    (r"^(distilbert\.)?transformer\.layer\.", "bert.encoder.layer."),
    (r"\.attention\.q_lin\.", ".attention.self.query."),
    (r"\.attention\.k_lin\.", ".attention.self.key."),
    (r"\.attention\.v_lin\.", ".attention.self.value."),
    (r"\.attention\.out_lin\.", ".attention.output.dense."),
    (r"\.sa_layer_norm\.", ".attention.output.LayerNorm."),
    (r"\.ffn\.lin1\.", ".intermediate.dense."),
    (r"\.ffn\.lin2\.", ".output.dense."),
    (r"\.output_layer_norm\.", ".output.LayerNorm."),
    (r"^vocab_transform\.", _WORDS + "transform.dense."),
    (r"^vocab_layer_norm\.", _WORDS + "transform.LayerNorm."),
    (r"^vocab_projector\.weight$", _WORDS + "decoder.weight"),
    (r"^vocab_projector\.bias$", _WORDS + "bias"),
    (r"^pre_classifier\.", "classifier.pre."),
)
_SPELLINGS: dict[str, tuple[str, Sequence[tuple[str, str]]]] = {
    "roberta": ("roberta.", _ROBERTA),
    "xlm-roberta": ("roberta.", _ROBERTA),
    "camembert": ("roberta.", _ROBERTA),
    "distilbert": ("distilbert.", _DISTILLED),
}
"""Beginnings of names of weights with a head, and the replacement of each pattern, by model_type."""
_PLACES = "embeddings.position_embeddings.weight"
_TYPES = "bert.embeddings.token_type_embeddings.weight"


def respelled(state: Mapping[str, Tensor], model_type: Any = None) -> dict[str, Tensor]:
    """Weights by the names of the tables. `model_type` is what their config.json says; without it names tell what they
    are of, where there is a head.
    """
    kind = model_type if isinstance(model_type, str) and model_type in _SPELLINGS else None
    if kind is None:
        kinds = (
            one for one, (begin, _) in _SPELLINGS.items() if any(name.startswith(begin) for name in state)
        )
        kind = next(kinds, None)
    if kind is None:
        return {_renamed(name, _OLD): tensor for name, tensor in state.items()}
    changes = (*_OLD, *_SPELLINGS[kind][1])
    if "classifier.dense.weight" in state:  # a pooler beside it is that of the pretraining
        state = {name: tensor for name, tensor in state.items() if not name.startswith("roberta.pooler.")}
    named = {_renamed(name, changes): tensor for name, tensor in state.items()}
    unused = library_of(kind).shift
    for name in [name for name in named if name.endswith(_PLACES) and unused]:
        named[name] = named[name][unused:]
    if kind == "distilbert" and (tokens := named.get("bert.embeddings.word_embeddings.weight")) is not None:
        named[_TYPES] = tokens.new_zeros(1, *tokens.shape[1:])  # it knows no segments
    return named


def _renamed(name: str, changes: Sequence[tuple[str, str]]) -> str:
    for pattern, new in changes:
        name = re.sub(pattern, new, name)
    return name
