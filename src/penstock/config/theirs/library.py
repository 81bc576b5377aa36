"""The form in which a family of transformers' text models is data: `Library`."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.boundary.files import shown
from penstock.config.activations import Mlp
from penstock.config.convert import shown_value
from penstock.config.model import ModelConfig, TextConfig
from penstock.config.theirs.names import Names

FREE = frozenset({
    "architectures", "auto_map", "bad_words_ids", "begin_suppress_tokens",
    "bos_token_id", "chunk_size_feed_forward", "classif_dropout", "classifier_dropout", "decoder_start_token_id",
    "directionality", "diversity_penalty", "do_sample", "dtype", "early_stopping", "eos_token_id", "eos_token_ids",
    "exponential_decay_length_penalty", "extra_pos_embeddings", "finetuning_task", "force_bos_token_to_be_generated",
    "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "id2label", "init_std",
    "initializer_factor", "initializer_range", "is_llama_config", "label2id", "length_penalty", "max_length",
    "max_window_layers", "min_length", "model_type", "n_ctx", "n_positions", "n_special", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_hidden_layers", "num_labels", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_past", "output_scores", "pad_token_id", "penstock", "pooler_fc_size",
    "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
    "predict_special_tokens", "prefix", "pretraining_tp", "qa_dropout", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id", "seq_classif_dropout",
    "sinusoidal_pos_embds", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tie_weights_",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
    "attn_implementation", "dense_act_fn", "is_gated_act",
})  # fmt: skip
"""Options that change nothing that a model computes: names, tokens, how weights are drawn, defaults of generation, and
what stands in files on the hub though transformers' models do not read it. So do those that begin with an underscore.
"""
Option = tuple[Any, tuple[str, ...]]
"""transformers' default, and our fields; the default names another option behind a `=`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTurns:
    """The options of models in which every n-th block sees all tokens and the others have a window, and with it other
    rotary positions or the same; each with its default."""

    window: tuple[str, int]
    every: tuple[str, int]
    """An empty name is no option: `layer_types` alone says which blocks have a window."""
    base: tuple[str, float] = ("", 0.0)
    """Rotary base of blocks that see all tokens; an empty name: all have the rotary positions of the library."""
    near_base: tuple[str, float] = ("", 0.0)
    """Rotary base of blocks with a window."""
    last: bool = False
    """Whether the last of n blocks sees all tokens, and not the first."""
    scale: tuple[str, int] | None = None
    """The number by whose square root scores are divided; none: the features of a head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """One family of transformers' models."""

    model_type: str
    architectures: Mapping[str, str]
    """Classes with a head, by ours: `words`, or what an encoder has."""
    base: ModelConfig
    """Configuration that holds for all of theirs, where no option says otherwise."""
    options: Mapping[str, Option]
    must: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Options that must have one of these values; the first is written."""
    activation: tuple[str, Mapping[str, Mlp]]
    """The option that names the activation, and what its values are."""
    names: Callable[[TextConfig], Names]
    prefix: str
    """Prefix of the base model's weights where there is a head."""
    heads: tuple[str, ...]
    """How names of other weights begin."""
    ignored: str = r"(?!)"
    """Weights that may be left out: a regular expression, in which `{depth}` is the number of blocks."""
    nulls: frozenset[str] = frozenset()
    """Options with a default of theirs whose null is a value of its own."""
    rotary: bool = False
    partial: bool = False
    """Whether rotary positions may turn a share of a head's features, or be scaled pair by pair."""
    unturned: bool = False
    """Whether some blocks may have no rotary positions."""
    saves_itself: bool = False
    """Whether what it reads is written as this one, though another computes the same."""
    last_token: tuple[str, ...] = ()
    """Options that name a token, written as the vocabulary's last: defaults of theirs may lie outside it."""
    own: tuple[str, ...] = ()
    """Fields of ours that config.json keeps under `penstock`, because transformers has one value for all."""
    default: str = ""
    """Activation where the option is absent."""
    of_classes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values allowed of options that change nothing but a head of classes."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Options that some versions of transformers call otherwise, with the names in `options`."""
    free: frozenset[str] = frozenset()
    """Options besides `FREE` that change nothing that its models compute."""
    window: Literal["none", "flagged", "always", "given"] | WindowTurns = "none"
    """Whether models have the `sliding_window` that config.json names: with `use_sliding_window` alone, always, or if
    it is given; or all blocks have one but every n-th."""
    mixtures: Mapping[str, str] = field(default_factory=dict)
    """Options that count the blocks with mixtures out of those that another option counts. Ours say every how many."""
    shift: int = 0
    """Difference between `max_position_embeddings` and the positions that are ever used."""
    written: bool = True
    """Whether our models are written as this one. What is only read is written as the one that it computes the same
    as."""


def refused(
    values: Mapping[str, Any], known: Container[str], must: Mapping[str, tuple[Any, ...]]
) -> Iterator[str]:
    """Each option of a config.json that has no place in our models, or another value than they have."""
    for option, value in values.items():
        if option in must:
            if value not in must[option]:
                allowed = must[option][0]
                yield f"config.json has {option} {shown_value(value)}, but Penstock's model has {allowed!r} only."
        elif option not in known and not option.startswith("_") and not _is_off(value):
            yield (
                f"config.json has {shown(option)} {shown_value(value)}, of which Penstock does not know what it "
                "changes; remove it if it changes nothing that the model computes."
            )


def _is_off(value: Any) -> bool:
    """Whether an option that is not known can change nothing, because it is turned off."""
    return value is None or value is False or value in ({}, [], "")
