"""Conversion of a model's linear layers to another form of `penstock.config.formats.PRODUCTS`.

Times for 30 M weights with 4 rows of inputs on one core of an AMD EPYC with AVX512 and VNNI: plain fp32 20 ms, packed
6, packed bf16 3.2, int8 1.2, int8_weights 3.8, int4 3. Weight-only int8 and int4 pay off for few rows only, as when one
text is generated.

8-bit inputs lose most after a norm, where few features are far larger than the others. In text encoders whose blocks
are computed in one call, `careful` products there divide features by the square root of their size before rounding.
Elsewhere they are in bf16, whose weights take twice the memory; a CPU without bf16 units rounds the remainder of the
first rounding as well, and multiplies twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from penstock.config.formats import PRODUCTS, Dtype, Product, Products, Weights
from penstock.config.graph import TokenInput
from penstock.cpu import this_cpu
from penstock.errors import ConfigError, EnvironmentProblem
from penstock.kernels.native_blocks import computes_blocks
from penstock.models.anatomy import Anatomy, anatomy_of
from penstock.models.expert_linear import ExpertLinear
from penstock.models.model import Model
from penstock.models.roles import Attention, Experts, Linear, Perceptron, Stem
from penstock.models.rounded import CLIP
from penstock.models.wrap import set_class
from penstock.products.eight_bits import Fp8, Fp8Linear, Int8Linear, RoundedExpertLinear, RoundedLinear
from penstock.products.integers import Int4, Int8, Int8Twice, Int8Weights
from penstock.products.shortlist import Shortlist
from penstock.products.stored import Bf16, OneDnn, Stored, StoredExperts, in_place_of

_log = logging.getLogger(__name__)
TRAINED: dict[Dtype | None, type[nn.Linear]] = {None: nn.Linear, "fp8": Fp8Linear, "int8": Int8Linear}
"""Classes of linear layers in training, by the format in which weights multiply."""
STORED: dict[Products, type[Stored]] = {
    "packed": OneDnn, "fp8": Fp8, "int8": Int8, "int8_weights": Int8Weights, "int4": Int4,
}  # fmt: skip
"""Classes of linear layers in inference; `plain` changes nothing."""
AnyLinear = nn.Linear | ExpertLinear
_ROUNDED = (RoundedLinear, RoundedExpertLinear)
_SAMPLES, _TOKENS = 8, 32
"""Number of random texts for measuring the size of features, and their tokens."""
UNCALIBRATED = 3.0
"""The base-2 logarithm of a clip without calibration: inputs from −8 to 8."""


def device_problem(device: torch.device | str, products: Products, *, serving: bool = False) -> str | None:
    """Why a device does not support this form, as a sentence with the remedy; None if it does."""
    device, row = torch.device(device), PRODUCTS[products]
    able = row.devices if serving else row.trains
    if device.type in able and (device.type != "cuda" or not any(row.capability)):
        return None
    if "cuda" not in able:
        return f"{products} is for a CPU, but the model is on {device}; choose plain, or fp8 on a GPU that has it."
    remedy = "choose plain, or on a CPU int8"
    if not serving:
        study = "penstock.products.convert.convert_linears(…, emulate=True)"
        remedy = f"choose products=plain, or study the rounding with {study}"
    needed = f"{products} needs a GPU of compute capability {row.capability[0]}.{row.capability[1]} or newer"
    if device.type != "cuda":
        needed = f"{needed}, or a CPU" if "cpu" in able else needed
        return f"{needed}, and the model is on {device.type}; move it to such a GPU first, or {remedy}."
    if torch.version.hip is not None:
        return f"{products} is built for NVIDIA's formats and not tested on AMD's GPUs; {remedy}."
    capability = torch.cuda.get_device_capability(device)
    if capability >= row.capability:
        return None
    others = (
        f" {name} needs {product.capability[0]}.{product.capability[1]} only;"
        for name, product in PRODUCTS.items()
        if product.weights == row.weights
        and product.capability <= capability
        and "cuda" in (product.devices if serving else product.trains)
    )
    name = torch.cuda.get_device_name(device)
    return f"{needed}, and {name} has {capability[0]}.{capability[1]};{''.join(others)} {remedy}."


def left_out(linears: Mapping[str, AnyLinear], anatomy: Anatomy, row: Product) -> Iterator[tuple[str, str]]:
    """Yield the names of linear layers that do not multiply as `row` says, each with the reason."""
    blocks = tuple(f"{block}." for block in anatomy.blocks)
    routers = _routers(anatomy)
    for name, module in linears.items():
        if not name.startswith(blocks):
            yield name, "outside the blocks"
        elif name in routers:
            yield name, "a router, whose choice of experts rounding would change"
        elif row.clips and isinstance(module, ExpertLinear):
            yield name, "experts, whose inputs cannot share a clip"
        elif type(module) not in (nn.Linear, ExpertLinear) and not isinstance(module, _ROUNDED):
            kind = type(module)
            yield name, f"a {kind.__module__}.{kind.__qualname__}, which computes in its own way"
        elif not _fits(module, row):
            sides, multiples = f"{module.in_features} × {module.out_features}", dict.fromkeys(row.multiple)
            yield name, f"{sides} are not multiples of {' and '.join(map(str, multiples))}"


def _routers(anatomy: Anatomy) -> set[str]:
    """Names of the routers: linear layers that choose experts, in fp32."""
    return set() if anatomy.unknown else {part.router.name for part in anatomy.parts(Experts) if part.router}


def absorbed(anatomy: Anatomy) -> set[str]:
    """Names of the linear layers that compute keys and values from latents; generation multiplies them from both
    sides."""
    if anatomy.unknown:
        return set()
    return {part.projections[1].name for part in anatomy.parts(Attention) if part.latents}


def _fits(linear: AnyLinear, row: Product) -> bool:
    inputs, outputs = row.multiple
    return not (linear.in_features % inputs or linear.out_features % outputs)


def convert_linears(
    model: nn.Module, products: Products, *, device: torch.device | str | None = None, emulate: bool = False
) -> dict[str, str]:
    """Let the linear layers inside a model's repeated blocks multiply in a form for training, in place; return the
    qualified names of the other linear layers, each with the reason.

    Parts before and after the blocks (stem, embeddings, head) do not change: the first and last layers are the most
    sensitive and a small part of the work. In fp8, layers whose sizes are not multiples of 16 do not change either.
    Weights and state dicts stay the same, except for a layer's learned clip, which begins at `UNCALIBRATED`;
    `products="plain"` undoes the conversion. Convert before compiling and sharding. `device` is where the model will
    run, by default where its weights are. `emulate` computes the same values slowly, on any device.

    Raises:
        ConfigError: the device does not support the form, or no layer can be converted.
    """
    if products not in PRODUCTS or not PRODUCTS[products].trains:
        raise ConfigError(
            f"products={products!r} is not a form for training; choose one of "
            f"{', '.join(name for name, row in PRODUCTS.items() if row.trains)}."
        )
    linears = {name: module for name, module in model.named_modules() if isinstance(module, AnyLinear)}
    if products == "plain":
        restore_linears(model)
        return {}
    if not emulate:
        devices = {module.weight.device for module in linears.values()} if device is None else {device}
        if problems := sorted({problem for each in devices if (problem := device_problem(each, products))}):
            raise ConfigError(problems)
    row = PRODUCTS[products]
    unchanged = dict(left_out(linears, anatomy_of(model), row))
    chosen = [name for name in linears if name not in unchanged]
    if not chosen:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(unchanged.items())[:5])
        raise ConfigError(
            f"No linear layer of this {type(model).__name__} can multiply in {products} ({reasons or 'it has none'}); "
            "use products=plain."
        )
    for name in unchanged:
        _restore(linears[name])
    for name in chosen:
        expert = isinstance(linears[name], ExpertLinear)
        set_class(linears[name], RoundedExpertLinear if expert else TRAINED[row.weights])
        linears[name].__dict__.update(products=products, emulate=emulate)
        linears[name]._parameters.pop(CLIP, None)
        if row.clips:
            weight = linears[name].weight
            # Also for weights on the meta device, which have no memory before they are sharded.
            clip = torch.full((1,), UNCALIBRATED, device="cpu" if weight.is_meta else weight.device)
            linears[name].register_parameter(CLIP, nn.Parameter(clip))
    _log.info("products in %s in %d linear layers; kept: %s", products, len(chosen), unchanged or "none")
    return unchanged


def restore_linears(model: nn.Module) -> None:
    """Undo `convert_linears`, in place."""
    for module in model.modules():
        _restore(module)


def _restore(module: nn.Module) -> None:
    if isinstance(module, _ROUNDED):
        set_class(module, ExpertLinear if isinstance(module, ExpertLinear) else nn.Linear)
        del module.__dict__["products"], module.__dict__["emulate"]
        module._parameters.pop(CLIP, None)


@torch.no_grad()
def store_linears(model: nn.Module, products: Products, *, careful: bool = False) -> nn.Module:
    """Store a model's linear layers, by role, in a form for inference; returns the model.

    Layers whose sizes do not fit the form are `packed`, or do not change if this CPU packs no bf16. Layers that
    training leaves out of fp8 (`convert_linears`) do not change, and neither do experts, unless a CPU stores
    them in fewer bits.
    `careful` is for outputs whose values matter, not only which output is the largest.

    Raises ConfigError for a form that the device or the dtype does not support.
    """
    if products == "plain":
        return model
    row, first = PRODUCTS[products], next(model.parameters())
    if not row.serves:
        why = "sets how gradients are computed, which inference does not need"
        if row.scales == "tensorwise":
            why = "has one scale for all rows of inputs, which would let a text change with its neighbours"
        able = " or ".join(
            n for n, product in PRODUCTS.items() if product.weights == row.weights and product.serves
        )
        raise ConfigError(f"weights={products} {why}; choose weights={able}.")
    if problem := device_problem(first.device, products, serving=True):
        raise ConfigError(f"weights={products}: {problem}")
    if first.device.type == "cpu":
        _require_onednn(products, first.dtype)
    anatomy = anatomy_of(model)
    exact = _behind_norms(anatomy) if careful and products == "int8" else set()
    in_one_call = exact and first.dtype == torch.float32 and computes_blocks()
    factors = _factors(model, exact) if in_one_call else {}
    stored: dict[nn.Linear, nn.Module] = {}
    careful_form = Bf16 if this_cpu().bf16 and this_cpu().packs_bf16 else Int8Twice
    for name, linear in _chosen(model, anatomy, products).items():
        if linear not in stored:
            if name in factors:
                stored[linear] = in_place_of(linear, Int8(linear, factors[name]))
            else:
                stored[linear] = _stored(linear, careful_form if name in exact else STORED[products], row)
        model.set_submodule(name, stored[linear])
    if row.weights is not None and "cpu" in row.devices:
        for name, experts in list(model.named_modules()):
            # Without a weight, other ranks hold the experts.
            if isinstance(experts, ExpertLinear) and experts.weight is not None:
                form = careful_form if name in exact else STORED[products]
                model.set_submodule(name, _stored_experts(experts, form, row))
    return model


def _require_onednn(products: Products, dtype: torch.dtype) -> None:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise EnvironmentProblem(
            "This torch was built without oneDNN, which this form needs; use weights=plain."
        )
    if dtype == torch.bfloat16 and products == "packed" and not this_cpu().packs_bf16:
        raise ConfigError(
            "weights=packed: oneDNN lays bf16 weights out only on a CPU with AVX-512; choose weights=plain, or "
            "precision=O0, whose fp32 weights it packs."
        )


def _behind_norms(anatomy: Anatomy) -> set[str]:
    """Names of the linear layers whose inputs come from a norm."""
    normed = {
        linear.name for part in anatomy.parts(Attention) for linear in (*part.projections, *part.latents)
    }
    feeds: list[Perceptron | Experts] = [*anatomy.parts(Perceptron), *anatomy.parts(Experts)]
    return normed | {linear.name for part in feeds for linear in (part.up, part.gate) if linear}


@torch.no_grad()
def _factors(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Factors that bring the input features of the named layers to similar size, (in,) each: the inverse square root of
    each feature's largest magnitude over random tokens. Empty for a model with inputs other than tokens, or with
    experts, because random tokens would not visit all of them."""
    if not isinstance(model, Model) or len(model.graph.inputs) > 1:
        return {}
    (words,), first = model.graph.inputs, model.graph.runs[0]
    if not isinstance(words, TokenInput) or first.stack.experts:
        return {}
    largest: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            largest[name] = inputs[0].float().abs().flatten(0, -2).amax(0)

        return hook

    hooks = [model.get_submodule(name).register_forward_pre_hook(watch(name)) for name in names]
    shape = (_SAMPLES, min(_TOKENS, first.max_tokens))
    model.features(torch.randint(words.vocabulary, shape, generator=torch.Generator().manual_seed(0)))
    for hook in hooks:
        hook.remove()
    # Features that are nearly zero here may be larger in other texts.
    return {name: size.clamp(min=float(size.mean()) / 100 + 1e-12).rsqrt() for name, size in largest.items()}


def _chosen(model: nn.Module, anatomy: Anatomy, products: Products) -> dict[str, nn.Linear]:
    """The linear layers of a model that a form for inference applies to, by name, without routers."""
    row = PRODUCTS[products]
    if row.linears == "blocks":
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        for name in {name for name, _ in left_out(linears, anatomy, row)} | absorbed(anatomy):
            linears.pop(name, None)
        if not linears:
            raise ConfigError(
                f"No linear layer of this {type(model).__name__} has sides that are multiples of {row.multiple[0]}, as "
                f"{products} needs; choose weights=plain."
            )
        return linears
    modules, left = dict(model.named_modules(remove_duplicate=False)), absorbed(anatomy) | _routers(anatomy)
    linears = {}
    roles: list[Linear | Stem] = [*anatomy.parts(Linear)]
    roles += (
        anatomy.parts(Stem) if products == "packed" else []
    )  # quantisation would cost the first layer most
    for role in (role for role in roles if role.name not in left):
        name, module = role.name, modules.get(role.name)  # None in a block that another rank holds
        if isinstance(module, Shortlist):
            name, module = f"{name}.rows", module.rows
        if isinstance(module, nn.Linear):
            linears[name] = module
    return linears


def _stored_experts(experts: ExpertLinear, form: type[Stored], row: Product) -> nn.Module:
    return StoredExperts(experts, lambda _, linear: _stored(linear, form, row))


def _stored(linear: nn.Linear, form: type[Stored], row: Product) -> nn.Module:
    if not _fits(linear, row):
        if linear.weight.dtype == torch.bfloat16 and not this_cpu().packs_bf16:
            return linear
        form = OneDnn
    return in_place_of(linear, form(linear))


def suited(model: nn.Module, weights: Weights | Products, *, own: bool) -> Products:
    """The form that `auto` means: `packed` on a CPU if that is faster and nobody else uses the model (`own`), else
    `plain`."""
    if weights != "auto":
        return weights
    first = next(model.parameters())
    supported = first.dtype == torch.float32 or (first.dtype == torch.bfloat16 and this_cpu().packs_bf16)
    on_cpu = first.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return "packed" if own and on_cpu and supported else "plain"
