"""A model as a folder of CTranslate2: our weights in that package's specification of a Transformer.

Encoder–decoders and decoders come whole. An encoder gives the features of its tokens, for CTranslate2 has no heads for
words or classes. Tokens are told by the names that `tokenizer.json` gives them; a model without a tokenizer has
numbers for names. Tokens that the model must never generate have a bias against them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.config.decoding import Decoding
from penstock.config.model import (
    DecoderConfig,
    EncoderConfig,
    ModelConfig,
    Seq2SeqConfig,
    ViTConfig,
    positions,
    stacks,
)
from penstock.config.plan import Plan
from penstock.config.stack import Mlp, Stack
from penstock.errors import ConfigError, EnvironmentProblem
from penstock.infer.load import Loaded, loaded
from penstock.infer.settings import ExportType
from penstock.models.decoder import Decoder
from penstock.models.encoder import Encoder
from penstock.models.positions import Learned
from penstock.models.seq2seq import Seq2Seq

TYPES: dict[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
"""CTranslate2's names of types."""
_ACTIVATIONS: dict[Mlp, str] = {
    "relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH", "swiglu": "SWISH", "geglu": "GELU",
    "geglu_tanh": "GELUTanh",
}  # fmt: skip
_NEVER = -1e4
"""Bias of a token that must not be generated; fp16 holds it."""
_LEAST = -100.0
"""Log-probabilities below are alike."""


def write_ctranslate(
    model: str | Path, target: Path, kind: ExportType, draw: Callable[[nn.Module], dict[str, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Write the model in a folder for CTranslate2 into the folder `target`, linear layers and embeddings in a type.
    Gives what CTranslate2 and what the model makes of the inputs that `draw` draws for it: of tokens their features, or
    logarithms of probabilities.

    Raises ConfigError for what CTranslate2 cannot compute, and EnvironmentProblem without the package.
    """
    try:
        import ctranslate2
    except ImportError:
        raise EnvironmentProblem(
            "CTranslate2's folders need the package ctranslate2. Install it with: pip install 'penstock[export]'."
        ) from None
    found = loaded(model, Plan(), weights="plain", tokenizer=None)
    found.model.requires_grad_(False)
    if problems := list(_problems(found)):
        raise ConfigError(problems)
    given, names = draw(found.model), _names(found)
    with torch.inference_mode():
        expected = _ours(found, given)
    spec = _spec(found.model, ctranslate2.specs)
    _tell(spec, found, names)
    _forbid(spec, found)
    spec.validate()
    spec.optimize(TYPES[kind])  # this rounds the model's own weights
    target.mkdir(parents=True, exist_ok=True)
    spec.save(str(target))
    return _theirs(found, given, names, target), expected


def _ours(found: Loaded, given: dict[str, Tensor]) -> Tensor:
    """What the model makes of inputs; of a target, for each token and the end behind it."""
    model = found.model
    if isinstance(model, Encoder):
        return model.features(given["tokens"], given["lengths"])[_real(given)]
    if isinstance(model, Decoder):
        return _likely(model(given["tokens"]), found)
    target = given["target"]
    start, end = (torch.full_like(target[:, :1], number) for number in (found.start or 0, found.ends[0]))
    likely = _likely(model(given["source"], torch.cat([start, target], dim=1), given["lengths"]), found)
    return likely.gather(2, torch.cat([target, end], dim=1)[:, :, None])[:, :, 0]


def _likely(logits: Tensor, found: Loaded) -> Tensor:
    if numbers := _never(found):
        logits[..., numbers] += _NEVER
    return logits.log_softmax(-1).clamp(min=_LEAST)


def _theirs(found: Loaded, given: dict[str, Tensor], names: list[str], folder: Path) -> Tensor:
    """The same of the runtime."""
    import ctranslate2

    how = {"intra_threads": torch.get_num_threads()}
    every = given["source" if "source" in given else "tokens"].tolist()
    lengths = given["lengths"].tolist() if "lengths" in given else [len(row) for row in every]
    rows = [row[:length] for row, length in zip(every, lengths, strict=True)]
    if isinstance(found.model, Encoder):
        features = ctranslate2.Encoder(str(folder), **how).forward_batch(rows).last_hidden_state
        return _tensor(features)[_real(given)]
    if isinstance(found.model, Decoder):
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


def lacking(config: ModelConfig) -> Iterator[str]:
    """What a model has that the export to CTranslate2 does not know; nothing for a model that it can write."""
    if isinstance(config, ViTConfig):
        yield "models of images"
        return
    causal = [False, True] if isinstance(config, Seq2SeqConfig) else [not isinstance(config, EncoderConfig)]
    for sizes, decodes in zip(stacks(config), causal, strict=True):
        known = {"learned", "sinusoidal"} | ({"rotary", "alibi"} if decodes else set())
        # Its biases by distance are those of a whole target, not of a prompt and what follows.
        known |= set() if isinstance(config, DecoderConfig) else {"relative"}
        if sizes.positions not in known:
            yield f"{'decoders' if decodes else 'encoders'} with positions={sizes.positions}"
        if sizes.positions == "rotary" and sizes.rotary.scaling == "yarn":
            yield "rotary positions with scaling=yarn"
        if sizes.window is not None:
            yield "sliding windows"
        if sizes.parallel:
            yield "parallel blocks"
        if not sizes.first_norm:
            yield "a first block without a norm"
        if sizes.experts:
            yield "mixtures of experts"
        if sizes.qk_norm and sizes.norm != "rms":
            yield "layer norms of queries and keys"
    if isinstance(config, Seq2SeqConfig) and config.encoder.norm_eps != config.decoder.norm_eps:
        yield "two norm_eps in one model"


def _problems(found: Loaded) -> Iterator[str]:
    """Why a model cannot be written."""
    config = found.model.config
    instead = "onnx-cache" if isinstance(config, DecoderConfig | Seq2SeqConfig) else "onnx"
    for what in dict.fromkeys(lacking(config)):
        yield f"The export to CTranslate2 does not know {what}; choose --to {instead}."
    if instead == "onnx-cache" and not found.ends:
        yield (
            "The model does not say which token ends a text, which CTranslate2 must know; write eos_token_id into its "
            "config.json."
        )
    if isinstance(config, Seq2SeqConfig) and found.start is None:
        yield (
            "The model does not say which token its decoder begins with; write decoder_start_token_id into its "
            "config.json."
        )


def _spec(model: Any, specs: Any) -> Any:
    """The package's specification of a model, with our weights."""
    config = model.config
    if isinstance(model, Seq2Seq):
        encoder, decoder = _encoder(specs, model.encoder, config), _decoder(specs, model.decoder, config)
        spec = specs.TransformerSpec(encoder, decoder)
    elif isinstance(model, Decoder):
        decoder = _decoder(specs, model.decoder, config)
        spec = specs.TransformerDecoderModelSpec(decoder)
    else:
        encoder = _encoder(specs, model.encoder, config, tables=1 if model.types is None else 2)
        spec = specs.TransformerEncoderModelSpec(encoder)
        if model.types is not None:
            encoder.embeddings[1].weight = model.types.weight
    if not isinstance(model, Decoder):
        encoder.embeddings[0].weight = model.tokens.weight
        _fill(encoder, model.encoder, config, positions(config)[0])
    if not isinstance(model, Encoder):
        decoder.embeddings.weight = model.tokens.weight
        _fill(decoder, model.decoder, config, positions(config)[-1])
        _linear(decoder.projection, model.head)
        if config.scale_outputs:
            decoder.scale_outputs = float(model.decoder.sizes.width**-0.5)
    return spec


def _sizes(specs: Any, sizes: Stack, config: Any) -> dict[str, Any]:
    return {
        "num_layers": sizes.depth, "num_heads": sizes.heads, "pre_norm": sizes.norm_first,
        "activation": specs.common_spec.Activation[_ACTIVATIONS[sizes.mlp]],
        "layernorm_embedding": config.embedding_norm, "relative_attention_bias": sizes.positions == "relative",
        "ffn_glu": sizes.gated, "rms_norm": sizes.norm == "rms", "qk_norm": sizes.qk_norm,
        "num_heads_kv": None if sizes.kv == sizes.heads else sizes.kv, "head_dim": sizes.head_width,
    }  # fmt: skip


def _encoder(specs: Any, stack: Any, config: Any, tables: int = 1) -> Any:
    return specs.TransformerEncoderSpec(
        **_sizes(specs, stack.sizes, config),
        num_source_embeddings=tables,
        embeddings_merge=specs.common_spec.EmbeddingsMerge.ADD,
    )


def _decoder(specs: Any, stack: Any, config: Any) -> Any:
    sizes, cross = stack.sizes, stack.blocks[0].cross is not None
    more: dict[str, Any] = {}
    if sizes.positions == "alibi":
        more = {"alibi": True, "alibi_use_positive_positions": True}
    rotary = sizes.rotary
    if sizes.positions == "rotary":
        kinds = specs.attention_spec.RotaryScalingType
        scaling = {"none": None, "linear": kinds.Linear, "llama3": kinds.Llama3}[rotary.scaling]
        more = {
            "rotary_dim": 0, "rotary_interleave": False, "rotary_base": rotary.base, "rotary_scaling_type": scaling,
            "rotary_scaling_factor": rotary.factor, "original_max_position_embeddings": rotary.trained,
        }  # fmt: skip
    spec = specs.TransformerDecoderSpec(**_sizes(specs, sizes, config), **more, with_encoder_attention=cross)
    for layer in spec.layer if "rotary_dim" in more and rotary.scaling == "llama3" else ():
        layer.self_attention.rotary_low_freq_factor = float(rotary.low)
        layer.self_attention.rotary_high_freq_factor = float(rotary.high)
        # The runtime reads it, but the specification declares it for the scaling `linear` alone.
        vars(layer.self_attention)["rotary_scaling_factor"] = np.float32(rotary.factor)
    return spec


def _fill(spec: Any, stack: Any, config: Any, rows: int) -> None:
    """Put weights into the specification of a stack that can be given so many tokens."""
    spec.scale_embeddings = float(stack.sizes.width**0.5) if config.scale_embeddings else False
    if stack.places is not None:
        learned = isinstance(stack.places, Learned)
        table = stack.places.weight if learned else stack.places(torch.arange(rows))
        spec.position_encodings.encodings = table
    if stack.embedding_norm is not None:
        _norm(spec.layernorm_embedding, stack.embedding_norm)
    if stack.norm is not None:
        _norm(spec.layer_norm, stack.norm)
    for layer, block in zip(spec.layer, stack.blocks):
        _attention(layer.self_attention, block.attention, block.norm1)
        _joined(
            layer.self_attention.linear[0],
            block.attention.qkv,
            block.attention,
            (block.attention.shared, 1, 1),
        )
        if stack.relative is not None:
            layer.self_attention.relative_attention_bias = stack.relative.weight
            layer.self_attention.relative_attention_max_distance = np.int32(stack.relative.furthest)
        if block.cross is not None:
            _attention(layer.attention, block.cross, block.cross_norm)
            _linear(layer.attention.linear[0], block.cross.q)
            _joined(layer.attention.linear[1], block.cross.kv, block.cross, (1, 1))
        _norm(layer.ffn.layer_norm, block.norm2)
        _mlp(layer.ffn, block.mlp, gated=stack.sizes.gated)


def _attention(spec: Any, attention: Any, norm: nn.Module) -> None:
    """What attention to oneself and to a source share."""
    _norm(spec.layer_norm, norm)
    _linear(spec.linear[-1], attention.out)
    if attention.scale is not None:
        spec.queries_scale = float(attention.scale)
    if attention.q_norm is not None:
        _norm(spec.q_norm, attention.q_norm)
        _norm(spec.k_norm, attention.k_norm)


def _joined(spec: Any, linear: nn.Linear, attention: Any, shares: Sequence[int]) -> None:
    """Rows of queries, keys and values, which lie together for each head of keys, as one behind the other: `shares` are
    the heads of each kind that lie together."""
    for name in ("weight", "bias"):
        rows = getattr(linear, name)
        if rows is not None:
            heads = torch.unflatten(rows, 0, (-1, sum(shares), attention.head_width))
            setattr(
                spec,
                name,
                torch.cat([part.flatten(0, 2) for part in torch.split(heads, list(shares), dim=1)]),
            )


def _mlp(spec: Any, mlp: Any, *, gated: bool) -> None:
    _linear(spec.linear_1, mlp.down)
    if not gated:
        _linear(spec.linear_0, mlp.up)
        return
    half = mlp.up.out_features // 2
    _linear(spec.linear_0, mlp.up, slice(0, half))
    _linear(spec.linear_0_noact, mlp.up, slice(half, None))


def _linear(spec: Any, linear: nn.Linear, rows: slice = slice(None)) -> None:
    spec.weight = linear.weight[rows]
    if linear.bias is not None:
        spec.bias = linear.bias[rows]


def _norm(spec: Any, norm: Any) -> None:
    spec.gamma = norm.weight
    if isinstance(norm, nn.LayerNorm):  # without a shift it would be taken for an RMS norm
        spec.beta = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias


def _names(found: Loaded) -> list[str]:
    """A name for each token of the model, of which no two are alike."""
    size: int = found.model.config.vocabulary
    told = [str(number) for number in range(size)] if found.tokenizer is None else found.tokenizer.words()
    told = [*told[:size], *[""] * (size - len(told))]
    return [name or f"<unused_{number}>" for number, name in enumerate(told)]


def _tell(spec: Any, found: Loaded, names: list[str]) -> None:
    """Set the vocabulary and the tokens with a meaning."""
    tokenizer, config = found.tokenizer, spec.config
    sizes = found.model.decoder.sizes if hasattr(found.model, "decoder") else found.model.encoder.sizes
    config.layer_norm_epsilon = sizes.norm_eps
    end = names[found.ends[0]] if found.ends else names[0]
    unknown = None if tokenizer is None else tokenizer.unknown
    begin = None if tokenizer is None else tokenizer.begin
    # Names that are not in the vocabulary would be added to it.
    config.unk_token = end if unknown is None else names[unknown]
    config.bos_token = end if begin is None else names[begin]
    config.eos_token = end
    if isinstance(found.model, Seq2Seq):
        config.decoder_start_token = names[found.start or 0]
        spec.register_source_vocabulary(names)
        spec.register_target_vocabulary(names)
    else:
        spec.register_vocabulary(names)


def _never(found: Loaded) -> list[int]:
    return [
        number for number, _ in Decoding(bias=found.never).biases if number < found.model.config.vocabulary
    ]


def _forbid(spec: Any, found: Loaded) -> None:
    numbers = _never(found)
    if numbers and not isinstance(found.model, Encoder):
        projection = spec.decoder.projection
        bias = projection.bias if projection.has_bias() else torch.zeros(found.model.config.vocabulary)
        bias = bias.clone()
        bias[numbers] += _NEVER
        projection.bias = bias
