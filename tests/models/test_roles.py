"""What an anatomy declares is true: of every family that is enrolled below, by computing it.

A family is enrolled in all tests by one line in `FAMILIES`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from helpers.sweeps import sweep
from penstock.config.model import PRESETS, ViTConfig
from penstock.errors import ConfigError
from penstock.models import Model, create, roles
from penstock.models.anatomy import Anatomy, Block, anatomy_of, pruned
from penstock.models.families import timm as timm_family
from penstock.models.families import transformers as transformers_family

OURS = ViTConfig(image_size=32, patch_size=8, width=48, depth=2, heads=4, mlp_width=96, classes=10)
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16}
T5 = {"d_model": 48, "d_kv": 12, "num_layers": 2, "num_heads": 4, "d_ff": 96, "vocab_size": 64}
BART = {
    "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "vocab_size": 64, "max_position_embeddings": 16,
    "decoder_start_token_id": 1,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "vocab_size": 64}
IMAGES = {"pixel_values": (2, 3, 32, 32)}
TEXT: dict[str, Any] = {"input_ids": (2, 7), "use_cache": False}
PAIRS: dict[str, Any] = {**TEXT, "decoder_input_ids": (2, 5)}

WORDS: dict[str, Any] = {"vocabulary": 64, "sequence": 16}
HALVES: dict[str, Any] = {"width": 48, "heads": 4, "depth": 2, "mlp_width": 96}

FAMILIES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "vit": (lambda: Model(OURS), {"images": (2, 3, 32, 32)}),
    "vit-all": (
        lambda: Model(replace(OURS, qk_norm=True, layer_scale=0.1, drop_path=0.1, dropout=0.1)),
        {"images": (2, 3, 32, 32)},
    ),
    "vit-conv": (lambda: Model(replace(OURS, stem="conv", classifier="pooled")), {"images": (2, 3, 32, 32)}),
    "gpt-ours": (lambda: _ours("gpt-tiny", **HALVES, dropout=0.1), {"tokens": (2, 7)}),
    "llama-ours": (lambda: _ours("llama-tiny", **HALVES, qk_norm=True), {"tokens": (2, 7)}),
    "bert-ours": (lambda: _ours("bert-tiny", **HALVES), {"tokens": (2, 7)}),
    "bert-classes-ours": (lambda: _ours("bert-tiny", **HALVES, head="classes"), {"tokens": (2, 7)}),
    "t5-ours": (lambda: _ours("t5-tiny"), {"source": (2, 7), "target": (2, 5)}),
    "bart-ours": (lambda: _ours("bart-tiny"), {"source": (2, 7), "target": (2, 5)}),
    "hf-vit": (lambda: _foreign("ViTForImageClassification", **SIZES, image_size=32, patch_size=8), IMAGES),
    "hf-vit-model": (lambda: _foreign("ViTModel", **SIZES, image_size=32, patch_size=8), IMAGES),
    "gpt2": (lambda: _foreign("GPT2LMHeadModel", **GPT2), TEXT),
    "gpt2-classifier": (lambda: _foreign("GPT2ForSequenceClassification", **GPT2, pad_token_id=0), TEXT),
    "llama": (lambda: _foreign("LlamaForCausalLM", **GROUPED), TEXT),
    "qwen2": (lambda: _foreign("Qwen2ForCausalLM", **GROUPED), TEXT),
    "qwen3": (lambda: _foreign("Qwen3ForCausalLM", **GROUPED, head_dim=8), TEXT),
    "bart": (lambda: _foreign("BartForConditionalGeneration", **BART), PAIRS),
    "marian": (lambda: _foreign("MarianMTModel", **BART, pad_token_id=0), PAIRS),
    "bert": (lambda: _foreign("BertForMaskedLM", **SIZES, vocab_size=64), {"input_ids": (2, 7)}),
    "bert-pairs": (lambda: _foreign("BertForSequenceClassification", **SIZES, vocab_size=64), {"input_ids": (2, 7)}),
    "bert-pretraining": (lambda: _foreign("BertForPreTraining", **SIZES, vocab_size=64), {"input_ids": (2, 7)}),
    "t5": (lambda: _foreign("T5ForConditionalGeneration", **T5), PAIRS),
    "t5-gated": (
        lambda: _foreign(
            "T5ForConditionalGeneration", **T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False
        ),
        PAIRS,
    ),
    "mixtral": (lambda: _foreign("MixtralForCausalLM", **GROUPED, num_local_experts=4), TEXT),
    "timm": (lambda: _timm("vit_tiny_patch16_224", depth=2, qk_norm=True, init_values=1e-5), {"x": (2, 3, 224, 224)}),
}  # fmt: skip


def _ours(name: str, **changes: Any) -> nn.Module:
    return create(replace(PRESETS[name], **WORDS, **changes))  # type: ignore[arg-type]


def _foreign(name: str, **sizes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, name)
    config = cls.config_class(**sizes)
    config._experts_implementation = "eager"  # grouped products do not take fp64
    model: nn.Module = cls(config)
    return model


def _timm(name: str, **options: Any) -> nn.Module:
    """timm needs a torchvision that fits the torch beside it, which CPU installations often lack."""
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"timm cannot be imported: {error}")
    model: nn.Module = timm.create_model(name, **options)
    return model


USUAL = ["vit-all", "llama-ours", "t5-ours", "gpt2", "t5-gated", "mixtral", "timm"]
SLOW = ["vit", "vit-conv", "bert-classes-ours", "hf-vit", "qwen3", "bart", "bert-pretraining"]


@pytest.fixture(params=sweep(FAMILIES, USUAL, SLOW))
def family(request: pytest.FixtureRequest) -> tuple[nn.Module, dict[str, Any]]:
    """A small model in fp64, none of whose parameters is at a neutral value, and its input."""
    factory, inputs = FAMILIES[request.param]
    torch.manual_seed(0)
    model = factory().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, {name: _input(name, value) for name, value in inputs.items()}


def _input(name: str, shape: Any) -> Any:
    if not isinstance(shape, tuple):
        return shape
    words = name.endswith("_ids") or name in ("tokens", "source", "target")
    return torch.randint(1, 64, shape) if words else torch.randn(shape, dtype=torch.float64)


def _owners(anatomy: Anatomy, parameter: str) -> list[roles.Role]:
    return [
        role
        for role in roles.walk(anatomy.stacks)
        if any(parameter == name or parameter.startswith(f"{name}.") for name in roles.owned(role))
    ]


def _check_whole(anatomy: Anatomy, parameters: list[str]) -> None:
    for name in parameters:
        assert _owners(anatomy, name) == [anatomy.role_of(name)], name


def test_every_parameter_has_exactly_one_role(family: tuple[nn.Module, dict[str, Any]]) -> None:
    model, _ = family
    anatomy = anatomy_of(model)
    assert not anatomy.unknown
    assert len(anatomy.blocks) == len({id(block) for block in anatomy.block_modules(model)})
    _check_whole(anatomy, [name for name, _ in model.named_parameters(remove_duplicate=False)])
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for role in roles.walk(anatomy.stacks):
        assert role.name in modules or role.name in parameters, role
        assert type(role) is not roles.Role, role
        if isinstance(role, roles.Dropout):
            assert not list(modules[role.name].parameters()) or role.name.rpartition(".")[2][:6] == "branch"


@pytest.mark.parametrize(
    "name",
    ["ViTForImageClassification", "GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM",
    "T5ForConditionalGeneration", "MixtralForCausalLM"],
)  # fmt: skip
def test_models_of_real_size_are_known_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        model = _foreign(name)
    anatomy = anatomy_of(model)
    for parameter, tensor in model.named_parameters():
        role = anatomy.role_of(parameter)
        assert role is not None, parameter
        if (
            0 < anatomy.depth_of(parameter) <= len(anatomy.blocks)
        ):  # a vocabulary may be odd, and would be padded
            first, second = (roles.share(role, tensor, index, 2).numel() for index in range(2))
            assert first == second >= tensor.numel() // 2


def test_depths_rise_with_the_order_of_running(family: tuple[nn.Module, dict[str, Any]]) -> None:
    model, _ = family
    anatomy = anatomy_of(model)
    for name, _ in model.named_parameters():
        within = [i for i, block in enumerate(anatomy.blocks) if name.startswith(f"{block}.")]
        after = any(role in _owners(anatomy, name) for role in roles.walk(anatomy.stacks[-1].after))
        if within:
            assert anatomy.depth_of(name) == within[0] + 1
        else:
            assert (anatomy.depth_of(name) == len(anatomy.blocks) + 1) == after, name
    assert anatomy.depth_of(next(name for name, _ in model.named_parameters())) == 0


@pytest.mark.parametrize("where", [0, -1])
def test_parts_split_in_two_add_up_to_the_whole(family: tuple[nn.Module, dict[str, Any]], where: int) -> None:
    """Heads, column and row pairs, gates and experts' matrices: outputs and all gradients."""
    model, inputs = family
    for stack in anatomy_of(model).stacks:
        block = stack.blocks[where]
        for part in block.parts:
            if isinstance(part, roles.Attention | roles.Perceptron | roles.Experts):
                _check_split(model, inputs, block, part)


def _check_split(model: nn.Module, inputs: dict[str, Any], block: Block, part: Any) -> None:
    original = model.get_submodule(block.name)
    args, kwargs = _call_of(model, original, inputs)
    output = part.out if isinstance(part, roles.Attention) else part.down
    whole, halves = copy.deepcopy(original), [_cut(original, block, part, index) for index in range(2)]
    modules = {name for name, _ in model.named_modules()}
    point = output.name if output.name in modules else part.name
    inner = point.removeprefix(f"{block.name}.")

    expected, given = _run(whole, args, kwargs)
    partial: list[Tensor] = []
    halves[1].get_submodule(inner).register_forward_hook(lambda _m, _a, out: partial.append(out))
    _, second = _run(halves[1], *_heads_of(part, 1, args, kwargs))
    halves[0].get_submodule(inner).register_forward_hook(lambda _m, _a, out: out + partial[0])
    got, first = _run(halves[0], *_heads_of(part, 0, args, kwargs))
    _assert_close(got, expected)

    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    _assert_close(_grad(first) + _grad(second), _grad(given))
    split = {name: role for role in roles.walk(part) for name in roles.owned(role)}
    others = [dict(half.named_parameters()) for half in halves]
    for name, parameter in whole.named_parameters():
        role = next((r for n, r in split.items() if f"{block.name}.{name}".startswith(n)), None)
        if isinstance(role, roles.Linear | roles.Embedding) and parameter.shape != others[0][name].shape:
            for index, other in enumerate(others):
                wanted = roles.share(role, _grad(parameter), index, 2)
                _assert_close(_grad(other[name]), wanted, msg=name)
        elif not (
            isinstance(role, roles.Linear) and role.split == "row"
        ):  # the first has a row-split bias alone
            _assert_close(_grad(others[0][name]) + _grad(others[1][name]), _grad(parameter), msg=name)


def _assert_close(got: Tensor, expected: Tensor, msg: str | None = None) -> None:
    # Root-mean-square norms of transformers round to fp32 inside: measured at most 2e-6 there, 1e-14 elsewhere.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, msg=msg)


def _heads_of(part: Any, index: int, *inputs: Any) -> Any:
    """What half of an attention's heads are called with: their half of biases that an earlier block made."""

    def half(value: Any) -> Any:
        per_head = isinstance(value, Tensor) and value.ndim == 4 and value.shape[1] == part.heads
        if (
            not per_head or (value.shape[2] != value.shape[3]) != part.cross
        ):  # both sequences differ in length
            return value
        return value.chunk(2, dim=1)[index]

    return tree_map(half, inputs) if isinstance(part, roles.Attention) else inputs


def _grad(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _call_of(model: nn.Module, block: nn.Module, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """With what the block is called while the model runs."""
    calls: list[tuple[Any, Any]] = []
    hook = block.register_forward_pre_hook(
        lambda _m, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return calls[0]


def _run(block: nn.Module, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    """The block's hidden states, and its input, which asks for a gradient."""
    hidden = (args[0] if args else kwargs["hidden_states"]).detach().clone().requires_grad_()
    out = block(hidden, *args[1:], **kwargs) if args else block(**{**kwargs, "hidden_states": hidden})
    return (out[0] if isinstance(out, tuple) else out), hidden


def _cut(original: nn.Module, block: Block, part: Any, index: int) -> nn.Module:
    """A copy of the block in which one part has share `index` of 2 of what can be split."""
    half = copy.deepcopy(original)
    split = [role for role in roles.walk(part) if isinstance(role, roles.Linear | roles.Embedding)]
    for role in split:
        _replace(half, role.name.removeprefix(f"{block.name}."), partial(_share, role, index))
    for role in roles.walk(part):
        column = isinstance(role, roles.Attention) or (
            isinstance(role, roles.Linear) and role.split == "column"
        )
        for count in role.counts if column else ():
            module = half.get_submodule(role.name.removeprefix(f"{block.name}."))
            if hasattr(module, count):
                setattr(module, count, getattr(module, count) // 2)
    return half


def _share(role: roles.Role, index: int, parameter: Tensor) -> Tensor:
    return roles.share(role, parameter, index, 2)


def _replace(root: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Change a parameter, or all of a module's own."""
    holder, _, last = name.rpartition(".")
    module = root.get_submodule(holder)
    if last not in module._parameters:
        module, names = root.get_submodule(name), None
    else:
        names = [last]
    for own in names or list(module._parameters):
        parameter = module._parameters[own]
        if parameter is not None:
            setattr(module, own, nn.Parameter(change(parameter.detach())))


def test_experts_of_two_devices_add_up_to_all(family: tuple[nn.Module, dict[str, Any]]) -> None:
    model, inputs = family
    for block in (block for stack in anatomy_of(model).stacks for block in stack.blocks):
        for part in (part for part in block.parts if isinstance(part, roles.Experts)):
            assert part.count == 4
            args, kwargs = _call_of(model, model.get_submodule(block.name), inputs)
            whole, first, second = (
                _mixture(model, block, part, owned, args, kwargs) for owned in ([0, 1, 2, 3], [0, 1], [2, 3])
            )
            torch.testing.assert_close(first + second, whole)


def _mixture(
    model: nn.Module, block: Block, part: roles.Experts, owned: list[int], args: Any, kwargs: Any
) -> Tensor:
    """What the mixture gives of some experts, the others being zero."""
    some = copy.deepcopy(model.get_submodule(block.name))
    for linear in (part.up, part.down):
        _replace(some, linear.name.removeprefix(f"{block.name}."), partial(_only, owned))
    outputs: list[Tensor] = []
    mixture = some.get_submodule(part.name.removeprefix(f"{block.name}."))
    mixture.register_forward_hook(lambda _m, _a, out: outputs.append(out))
    _run(some, args, kwargs)
    return outputs[0]


def _only(owned: list[int], experts: Tensor) -> Tensor:
    kept = torch.zeros_like(experts)
    kept[owned] = experts[owned]
    return kept


def test_vocabularies_and_outputs_split_in_two(family: tuple[nn.Module, dict[str, Any]]) -> None:
    model, _ = family
    anatomy = anatomy_of(model)
    for embedding in (e for e in anatomy.parts(roles.Embedding) if e.kind == "token"):
        table: Any = model.get_submodule(embedding.name)
        ids = torch.randint(0, table.num_embeddings, (3, 5))
        total = torch.zeros(3, 5, table.embedding_dim, dtype=torch.float64)
        for index in range(2):
            rows = roles.share(embedding, table.weight.detach(), index, 2)
            local = ids - index * len(rows)
            mine = (local >= 0) & (local < len(rows))
            total += rows[local.clamp(0, len(rows) - 1)] * mine.unsqueeze(-1)
        torch.testing.assert_close(total, table(ids))
    for head in anatomy.parts(roles.Head):
        linear: Any = model.get_submodule(head.name)
        x = torch.randn(3, linear.in_features, dtype=torch.float64)
        halves = [copy.deepcopy(linear) for _ in range(2)]
        for index, half in enumerate(halves):
            _replace(half, "", partial(_share, head, index))
        torch.testing.assert_close(torch.cat([half(x) for half in halves], dim=-1), linear(x))


def _manifests() -> Iterator[Any]:
    for path in sorted((Path(__file__).parent / "manifests").iterdir()):
        yield pytest.param(json.loads(path.read_text()), id=path.stem)


@pytest.mark.parametrize("manifest", list(_manifests()))
def test_timms_recorded_names_have_one_role_each(manifest: dict[str, Any]) -> None:
    names = list(manifest["state"])
    config = ViTConfig(**manifest["config"])
    stack = pruned(timm_family.vit_stack(names, config.heads), names)
    anatomy = Anatomy(family="timm_vit", stacks=(stack,))
    _check_whole(anatomy, names)
    assert len(anatomy.blocks) == config.depth


def test_names_in_files_of_transformers_vit_have_one_role_each() -> None:
    from penstock.models.convert import to_hf

    names = [name.removeprefix("vit.") for name in to_hf(Model(OURS).state_dict(), OURS)]
    names = [name for name in names if not name.startswith("classifier")]
    stacks = pruned(transformers_family.vit_stacks(names, 4), names)
    _check_whole(Anatomy(family="hf_vit", stacks=stacks), names)


def test_shares_of_fused_matrices_are_of_every_one() -> None:
    rows = torch.arange(12.0)
    fused = roles.Linear("qkv", "column", fused=(2, 1, 1))
    assert roles.share(fused, torch.arange(8.0), 0, 2).tolist() == [0, 1, 4, 6]
    assert roles.share(fused, torch.arange(8.0), 1, 2).tolist() == [2, 3, 5, 7]
    with pytest.raises(ValueError, match="do not split over 3"):
        roles.share(fused, rows[:8], 0, 3)


def test_what_needs_roles_is_refused_for_a_model_that_nobody_enrolled() -> None:
    anatomy = anatomy_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert anatomy.role_of("0.weight") is None
    with pytest.raises(ConfigError, match=r"of the role Attention.*anatomy\.enrol\('torch\.nn"):
        anatomy.parts(roles.Attention)
