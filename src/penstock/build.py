"""THE ORDER: how a Plan is applied to a model. Read `build` from top to bottom; each step says why it comes there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.config.formats import PRODUCTS
from penstock.config.fused import FusedName
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.config.recipes import INSIDE, require_recipe
from penstock.config.rules import require
from penstock.config.run import Recipe
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.anatomy import anatomy_of, let_recompile, set_switches
from penstock.models.convert import from_pretrained, load_weights
from penstock.models.fuse import fuse
from penstock.models.lora import add_adapters, base_outputs, gives_classes, store_base
from penstock.models.model import Model
from penstock.optim import EMA, make_optimizer, parameter_groups
from penstock.optim.clip import gradients_of
from penstock.optim.groups import freeze
from penstock.parallel import ALONE, DataParallel, ParallelDims, dims_of, recompute_blocks, replicate, shard
from penstock.parallel.context import split_tokens
from penstock.parallel.data import running_statistics
from penstock.parallel.dims import DATA, LOSS
from penstock.parallel.fsdp import shard_frozen
from penstock.parallel.offload import offload_blocks
from penstock.parallel.pipeline import Stages, cut_stages, split_backwards
from penstock.parallel.sharded_init import Drawing, drawing_of, make, shares
from penstock.parallel.stage_cut import counts_by_size
from penstock.parallel.tensor import partial_gradients, split_layers
from penstock.planner.describe import totals
from penstock.planner.pipeline import stage_counts
from penstock.precision import (
    LossScaler,
    MasterWeights,
    Precision,
    apply_precision,
    precision_of,
)
from penstock.precision.master import cast_in_place
from penstock.precision.scaler import agree_over
from penstock.products.convert import convert_linears
from penstock.step import Pipeline, Runner, TrainStep
from penstock.tasks import Embedding, Loss, Preferences, Task, classification_loss, task_of
from penstock.tasks.peers import Peers
from penstock.tasks.teacher import open_teacher

__all__ = ["Built", "Loss", "build", "compile_model"]


_log = logging.getLogger(__name__)
_FP16_EPS = 1e-6
"""Measured on a small ViT: 1e-6 learns, 1e-5 to 1e-3 as well as fp32, 1e-8 ends in NaN within 30 steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model ready to train. `step([batch, …])` trains it; several can take turns in one process."""

    model: nn.Module
    optimizer: Optimizer
    step: TrainStep
    plan: Plan
    recipe: Recipe
    device: torch.device
    config: ModelConfig | None
    """None for a model that was given as a module."""
    loss: Loss
    scaler: LossScaler | None
    ema: EMA | None
    dims: ParallelDims
    """This rank's place among those that train together."""
    replicas: DataParallel | None = None
    """How other ranks take part; None where this process trains alone."""
    fused: Mapping[FusedName, int] = field(default_factory=dict)
    """Places of the model that compute by each fused operator."""
    parameters: int = 0
    """Parameters of the whole model, those of other stages included."""

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Inside, `model` is in eval mode, without gradients, computes as the Plan says, and has the averages of its
        weights where the Recipe keeps them (`ema_decay`) and a step was made, as `penstock train` evaluates it."""
        with self.step.inference(), self.ema.swapped() if self.ema and self.ema.begun else nullcontext():
            yield


def build(
    model: ModelConfig | nn.Module | Callable[[], nn.Module],
    plan: Plan,
    *,
    device: torch.device | str = "cpu",
    recipe: Recipe | None = None,
    loss: Loss | None = None,
    seed: int = 0,
    machine: Machine | None = None,
    dims: ParallelDims | None = None,
) -> Built:
    """Apply a Plan to a model: a configuration, or any module (timm, transformers, your own), changed in place; or a
    function that makes one. With a function, no rank needs memory for a whole model that the Plan shards.

    `seed` decides the weights of a configuration, and of what a function makes, the same on every device and under
    every Plan; the global generator is left untouched. `loss` is a Task or any function `loss(model, batch)`, which
    returns the mean loss, or (sum, count), by which all targets of a step weigh the same (see `Loss`). Without one, the
    task of the configuration's family is taken, and image classification for a module. Names in the state dict
    are the same under every Plan. With a `machine`, the Plan is validated against it first. A Plan for several ranks is
    built on each of them, in the existing process group; `dims` is this rank's place in it, if the caller knows it.

    Raises ConfigError when the Plan contradicts model, machine or ranks.
    """
    recipe = recipe or Recipe()
    device = torch.device(device)
    config = None if isinstance(model, nn.Module) or callable(model) else model
    require(plan, run=True)
    require_recipe(recipe, plan, preferences=isinstance(loss, Preferences))
    if config is not None and machine is not None:
        require(plan, config, machine, run=True)
    if dims is None:
        dims = dims_of(plan, device) if plan.gpus > 1 else ALONE

    loss = loss or (classification_loss if config is None else task_of(config))
    if isinstance(loss, Embedding) and plan.dp != plan.gpus:
        raise ConfigError(
            "The task embedding compares the texts of all ranks, so each rank must have texts of its own and the whole "
            "of their vectors; use plan.tp=1, plan.pp=1 and plan.cp=1."
        )
    if isinstance(loss, Task) and loss.compares and dims.data_world > 1:
        loss = loss.among(Peers(dims.group(*DATA), dims.data_world, dims.data_rank))

    # Weights are drawn on the host: the same seed gives the same model on every device. If they will be sharded, each
    # is freed as soon as this rank has its rows, so that no rank needs memory for all.
    # With split layers or experts, the fp32 masters of O2 are the shards of `fully_shard`, which knows DTensors, of one
    # rank.
    divided = plan.tp > 1 or plan.ep > 1
    masters_apart = divided and plan.precision == "O2"
    sharded = (plan.sharding != "ddp" or masters_apart) and not dims.alone
    rows: dict[str, Tensor] | None = None
    if isinstance(model, nn.Module):
        module = model
    elif sharded and not recipe.lora.rank and not divided:
        drawing = drawing_of(dims)
        module = _created(model, seed, drawing)
        rows = dict(shares(module, drawing))
    else:
        module = _created(model, seed)

    # Adapters are linears beside linears: whatever follows treats them as parts of the model.
    if recipe.lora.rank and PRODUCTS[plan.products].clips:
        raise ConfigError(
            f"plan.products={plan.products} learns how inputs of whole weights are clipped, and recipe.lora adds "
            "adapters to these later; use products=int8, or set recipe.lora.rank to 0."
        )
    if recipe.lora.rank:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            add_adapters(module, recipe.lora)

    parameters = sum(parameter.numel() for parameter in module.parameters())
    # While names are the whole model's, and before the device gets any weight. What is loaded later is rounded as well.
    store_base(module, recipe.lora)
    # Cast on the way to the device, and before anything keeps a reference to a parameter. The levels with master
    # weights are halved once the optimizer holds the fp32 ones.
    precision = precision_of(plan, recipe.lists, device)
    if precision.weights == "half" and precision.master == "none":
        module = module.to(precision.dtype)
    if precision.products != "plain":
        convert_linears(module, precision.products, device=device)
    # On the host, so that of what is split each device gets its part alone.
    split = split_layers(module, plan, dims, alike=config is not None) if divided else None
    # A stage's rank lets go of what others hold before anything else is made of the model.
    stages = _cut(module, config, plan, dims, device, recipe) if plan.pp > 1 else None
    if stages is not None and rows is not None:
        rows = {name: rows[name] for name, _ in module.named_parameters() if name in rows}
    apply_precision(module, precision, device)
    module = module.to(device) if rows is None else _what_is_there(module, device)
    module.train()
    # Before anything looks for what learns: recomputation, replicas, shards, the optimizer.
    if stages is None:
        freeze(module, recipe.freeze)
    if plan.schedule == "zero_bubble":
        split_backwards(module)

    # What the blocks compute with is set before they are compiled. Defaults are not set, so that models without a
    # choice are accepted.
    set_switches(module, plan)
    fused = _fuse(module, plan, precision, device)
    split_tokens(module, plan, dims)
    if stages is not None:
        stages.attach()
    # Recomputation comes before compilation, which then covers it, and before FSDP, so that weights are gathered once
    # for both.
    recompute_blocks(module, plan, config, device)
    if plan.offload == "activations":
        offload_blocks(module, device, keep_last=stages is None)
    compile_model(module, plan)

    # A teacher is no part of what learns, is sharded or saved: the loss alone knows it. It computes by the same Plan.
    if recipe.teacher is not None and any(getattr(recipe, name) for name in ("teacher_weight", *INSIDE)):
        divides = plan.sharding in ("fsdp", "hsdp") and not dims.alone
        teacher_rows: dict[str, Tensor] = {}
        load = partial(_rows_of_weights, dims, teacher_rows) if divides else from_pretrained
        teacher = open_teacher(recipe, loss, config, module, dtype=precision.dtype, load=load)
        _what_is_there(teacher.model, device) if divides else teacher.model.to(device)
        set_switches(teacher.model, plan)
        _fuse(teacher.model, plan, precision, device)
        compile_model(teacher.model, plan)
        if divides:
            teacher.release = shard_frozen(teacher.model, plan, dims, device, teacher_rows)
        assert isinstance(loss, Task)  # others were refused
        loss = loss.taught_by(teacher)
    # So is the reference of preferences, which must round as the model does: before the first step they are equal.
    if isinstance(loss, Preferences) and loss.reference is None:
        # With adapters they are the weights beside these.
        alone = recipe.lora.rank and not recipe.lora.also and not gives_classes(module)
        reference = (
            partial(base_outputs, module)
            if alone
            else _reference(loss, config, plan, precision, device, seed)
        )
        loss = loss.beside(reference, recipe.preference_beta)

    # Sharding replaces all parameters. Under O2 the shards are the fp32 masters, and what is gathered of them is half.
    replicas: DataParallel | None = None
    partial_sums = None if split is None or plan.tp == 1 else lambda: list(partial_gradients(module, split))
    if sharded:
        replicas = replace(shard(module, plan, dims, device, shares=rows), partial=partial_sums)

    # The optimizer comes after every change to parameters: contiguous makes them views of its flat buffers.
    groups = parameter_groups(module, weight_decay=recipe.weight_decay, layer_decay=recipe.layer_decay)
    betas = (recipe.beta1, recipe.beta2)
    optimizer = make_optimizer(
        groups, plan.optimizer, plan.algorithm, lr=recipe.lr, betas=betas, eps=recipe.eps
    )

    if plan.algorithm == "adamw" and numerics_of(plan).moments == "fp16" and recipe.eps < _FP16_EPS:
        _log.warning(
            "recipe.eps is %g, but with plan.precision=O3 plan.dtype=fp16 AdamW's second moment is kept in fp16, where "
            "what lies below 6e-8 is zero: updates would be divided by eps alone and training would end in NaN. Use "
            "recipe.eps=1e-4, or dtype=bf16.",
            recipe.eps,
        )

    # The optimizer now holds the fp32 weights. Under O2 they stay with it as masters, and the model gets half ones.
    masters: MasterWeights | None = None
    if precision.master == "copy" and precision.dtype is not None and not sharded:
        masters = MasterWeights(
            [module], [optimizer], precision.dtype, norms=precision.norms, lists=precision.lists
        )

    # Replicas watch the parameters that gradients come to, so these must be the last ones.
    if split is not None and not sharded:
        # The passes of `replicate` know no DTensors, so that gradients are averaged after them.
        late = partial(gradients_of, optimizer)
        buffers = running_statistics(module)
        replicas = DataParallel(model=module, dims=dims, buffers=buffers, late=late, partial=partial_sums)
    elif dims.degree(*LOSS) > 1 and not sharded:
        # Master weights take over each micro-batch's gradients before the next, so what they have added up is reduced.
        # Passes of a pipeline's micro-batches take turns, so it is so there too.
        later = stages is not None or (precision.master != "none" and plan.accumulate > 1)
        replicas = replicate(module, dims, device, late=partial(gradients_of, optimizer) if later else None)

    # Averages and loss scale look at the finished parameters; the step ties all together.
    ema: EMA | None = None
    if recipe.ema_decay is not None:
        weights = None if masters is None else masters.named(module)
        publish = None if masters is None else masters.publish
        ema = EMA(module, recipe.ema_decay, optimizer, weights=weights, publish=publish, every_step=True)
    scaler = _scaler(recipe, device, dims) if precision.scales else None
    runner: Runner | None = None
    if stages is not None:
        runner = Pipeline(stages, loss, plan, scaler=scaler, masters=masters, replicas=replicas)
    step = TrainStep(
        module,
        optimizer,
        plan=plan,
        device=device,
        loss=loss,
        clip_norm=recipe.clip_norm,
        scaler=scaler,
        ema=ema,
        masters=masters,
        replicas=replicas,
        runner=runner,
    )
    return Built(
        model=module, optimizer=optimizer, step=step, plan=plan, recipe=recipe, device=device, config=config,
        loss=loss, scaler=scaler, ema=ema, dims=dims, replicas=replicas, fused=fused, parameters=parameters,
    )  # fmt: skip


def _reference(
    task: Preferences,
    config: ModelConfig | None,
    plan: Plan,
    precision: Precision,
    device: torch.device,
    seed: int,
) -> nn.Module:
    """The model that preferences start from, whole, which computes by the same Plan. Raises ConfigError without it."""
    if task.init_from is None or config is None:
        raise ConfigError(
            "Preferences compares a configuration's model with the weights that it starts from; name them with --from "
            "(init_from), or give the task a model with `beside`."
        )
    module = _created(config, seed)
    if precision.products != "plain":
        convert_linears(module, precision.products, device=device)
    load_weights(module, task.init_from)
    apply_precision(module, precision, device)
    module = module.to(device)
    set_switches(module, plan)
    _fuse(module, plan, precision, device)
    compile_model(module, plan)
    if precision.weights == "half" and precision.dtype is not None:
        cast_in_place([module], precision.dtype, norms=precision.norms, lists=precision.lists)
    return module


def _fuse(
    module: nn.Module, plan: Plan, precision: Precision, device: torch.device
) -> Mapping[FusedName, int]:
    """Put fused operators in place, as `plan.fuse` says; returns in how many places each is."""
    if not plan.fuse:
        return {}
    dtype = precision.dtype or torch.float32
    return fuse(module, plan.fuse, device=device, dtype=dtype, compiled=plan.compile != "none")


def _cut(
    module: nn.Module,
    config: ModelConfig | None,
    plan: Plan,
    dims: ParallelDims,
    device: torch.device,
    recipe: Recipe,
) -> Stages:
    """This rank's stages of a model. What is frozen is named by the whole model, so it is frozen first."""
    freeze(module, recipe.freeze)
    count = plan.pp * plan.virtual
    counts = counts_by_size(module, count) if config is None else stage_counts(totals(config), count)
    return cut_stages(module, counts, dims, device, fixed=plan.padding == "keep")


def _created(
    model: ModelConfig | Callable[[], nn.Module], seed: int, drawing: Drawing | None = None
) -> nn.Module:
    factory = model if callable(model) else partial(create, model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory() if drawing is None else make(factory, drawing)


def _rows_of_weights(dims: ParallelDims, rows: dict[str, Tensor], name: str) -> Model:
    """A trained model of which this rank reads its `rows` alone, by the names of their parameters."""
    drawing = drawing_of(dims)
    model = make(partial(from_pretrained, name), drawing)
    rows.update(shares(model, drawing))
    return cast(Model, model)


def _what_is_there(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with all that has memory on `device`, where `Module.to` would ask for the rest too."""
    for parameter in module.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    for inner in module.modules():
        for name, buffer in inner.named_buffers(recurse=False, remove_duplicate=False):
            if not buffer.is_meta:
                setattr(inner, name, buffer.to(device))
    return module


def _scaler(recipe: Recipe, device: torch.device, dims: ParallelDims) -> LossScaler:
    agree = None if dims.alone else agree_over()
    if recipe.loss_scale is None:
        return LossScaler(device, agree=agree)
    constant = recipe.loss_scale
    return LossScaler(device, initial=constant, floor=constant, ceiling=constant, dynamic=False, agree=agree)


def compile_model(model: nn.Module, plan: Plan, **options: Any) -> None:
    """Compile as `plan.compile` says, in place, so that no name in the state dict changes.

    `blocks` compiles each repeated block of the model's Anatomy: they share their code, so one compilation serves all
    and takes a fraction of the time of `whole`. `options` go to torch.compile. Raises ConfigError when the blocks of a
    foreign model cannot be found.
    """
    if plan.compile == "none":
        return
    let_recompile()
    options = {"dynamic": False, **options}
    if plan.compile == "whole":
        from penstock.kernels.embedding_gradient import (
            AddTouchedRows,
        )  # late: Inductor takes a second to import

        if "backend" not in options and "mode" not in options:
            passes = {"post_grad_custom_pre_pass": AddTouchedRows()}
            options["options"] = {**passes, **options.get("options", {})}
        model.compile(**options)
        return
    for block in anatomy_of(model).block_modules(model):
        # How many samples go through the block of an expert differs from step to step.
        varies = getattr(block, "expert", None) is not None
        block.compile(**({**options, "dynamic": None} if varies else options))
