"""How a Plan becomes a training step: read `build` from top to bottom. Changes to a model are in `penstock.apply`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.apply import TRAINING, Setup, apply
from penstock.config.fused import FusedName
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.config.numerics import numerics_of
from penstock.config.optimizers import OPTIMIZERS
from penstock.config.plan import Plan
from penstock.config.recipes import INSIDE, require_recipe
from penstock.config.rules import require
from penstock.config.run import Recipe
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.draw import seeded
from penstock.optim import EMA, make_optimizer, parameter_groups
from penstock.optim.clip import gradients_of
from penstock.parallel import ALONE, DataParallel, ParallelDims, dims_of, replicate, shard
from penstock.parallel.data import running_statistics
from penstock.parallel.dims import DATA, LOSS
from penstock.parallel.sharded_init import made_in_rows
from penstock.parallel.tensor import partial_gradients
from penstock.precision import LossScaler, MasterWeights
from penstock.precision.scaler import agree_over
from penstock.precision.settings import half_type, listed_numerics
from penstock.step import Pipeline, Runner, TrainStep
from penstock.tasks import Embedding, Loss, Preferences, Task, classification_loss, task_of
from penstock.tasks.peers import Peers
from penstock.tasks.preferences import reference_for
from penstock.tasks.teacher import open_teacher

__all__ = ["Built", "Loss", "build"]

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
    """None for a model that was passed as a module."""
    loss: Loss
    scaler: LossScaler | None
    ema: EMA | None
    dims: ParallelDims
    """This rank's place among the ranks that train together."""
    replicas: DataParallel | None = None
    """Data parallelism with other ranks; None if this process trains alone."""
    fused: Mapping[FusedName, int] = field(default_factory=dict)
    """Number of modules that use each fused operator."""
    parameters: int = 0
    """Number of parameters of the whole model, including other stages."""

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Inside, `model` is as `penstock train` evaluates it: in eval mode, without gradients, in the Plan's types,
        and with the averages of its weights if the Recipe keeps them (`ema_decay`) and a step was made."""
        with self.step.inference(), self.ema.swapped() if self.ema and self.ema.begun else nullcontext():
            yield


def build(
    model: ModelConfig | nn.Module | Callable[[], nn.Module], plan: Plan, *,
    device: torch.device | str = "cpu", recipe: Recipe | None = None, loss: Loss | None = None, seed: int = 0,
    machine: Machine | None = None, dims: ParallelDims | None = None,
) -> Built:  # fmt: skip
    """Apply a Plan to a model: a configuration, or any module (timm, transformers, your own), which is changed in
    place; or a function that returns a module. With a function, no rank needs memory for a whole model that the Plan
    shards.

    `seed` determines the weights of a configuration or of a function's model, which are equal on every device and under
    every Plan; the global generator is not changed. `loss` is a Task or any function `loss(model, batch)`, which
    returns the mean loss, or (sum, count), so that all targets of a step have the same weight (see `Loss`). The default
    is the task of the configuration's family, and image classification for a module. Names in the state dict are the
    same under every Plan. With a `machine`, the Plan is validated against it first. A Plan for several ranks is built
    on each of them, in the existing process group; `dims` is this rank's place in it, if the caller knows it.

    Raises ConfigError when the Plan contradicts model, machine or ranks.
    """
    recipe = recipe or Recipe()
    plan, device = recipe.planned(plan), torch.device(device)
    config = None if isinstance(model, nn.Module) or callable(model) else model
    require(plan, run=True)
    require_recipe(recipe, plan, preferences=isinstance(loss, Preferences))
    if config is not None and machine is not None:
        require(plan, config, machine, run=True)
    dims = dims or (dims_of(plan, device) if plan.gpus > 1 else ALONE)
    loss = _among_ranks(loss or (classification_loss if config is None else task_of(config)), plan, dims)

    # All changes to the model itself are in the table of `penstock.apply`.
    module, rows = _whole_model(model, plan, recipe, dims, seed)
    setup = Setup(
        purpose=TRAINING, plan=plan, numerics=listed_numerics(plan, recipe.lists, device), device=device,
        recipe=recipe, config=config, dims=dims, seed=seed, rows=rows,
    )  # fmt: skip
    module = apply(module, setup)
    loss = _with_companions(loss, module, setup)

    # Sharding replaces all parameters. The optimizer comes after every change to them: contiguous makes them views of
    # its flat buffers. Replicas hook the parameters that get gradients, so nothing may replace parameters after that.
    replicas = _sharded(module, setup)
    optimizer = _optimizer(module, plan, recipe)
    masters = _masters(module, optimizer, setup)
    if replicas is None:
        replicas = _replicated(module, optimizer, setup)

    # Averages read the finished parameters. The step combines everything.
    ema = _averages(module, optimizer, masters, recipe)
    scaler = _scaler(recipe, device, dims) if setup.numerics.scales else None
    runner: Runner | None = None
    if setup.stages is not None:
        runner = Pipeline(setup.stages, loss, plan, scaler=scaler, masters=masters, replicas=replicas)
    step = TrainStep(
        module, optimizer, plan=plan, device=device, loss=loss, clip_norm=recipe.clip_norm, scaler=scaler, ema=ema,
        masters=masters, replicas=replicas, runner=runner,
    )  # fmt: skip
    return Built(
        model=module, optimizer=optimizer, step=step, plan=plan, recipe=recipe, device=device, config=config,
        loss=loss, scaler=scaler, ema=ema, dims=dims, replicas=replicas, fused=setup.fused,
        parameters=setup.parameters,
    )  # fmt: skip


def _shards(plan: Plan, dims: ParallelDims) -> bool:
    """Whether parameters are sharded. With split layers or experts O2 shards too, over one rank if need be: its fp32
    masters are then the shards, as `fully_shard` handles DTensors."""
    divided = plan.tp > 1 or plan.ep > 1
    return (plan.sharding != "ddp" or (divided and plan.precision == "O2")) and not dims.alone


def _whole_model(
    model: ModelConfig | nn.Module | Callable[[], nn.Module], plan: Plan, recipe: Recipe, dims: ParallelDims,
    seed: int,
) -> tuple[nn.Module, dict[str, Tensor] | None]:  # fmt: skip
    """The module; and this rank's rows of its parameters, if they are on the meta device until they are sharded.

    Weights are drawn on the host: the same seed gives the same model on every device. If they will be sharded, each is
    freed once this rank has its rows, so that no rank needs memory for all.
    """
    if isinstance(model, nn.Module):
        return model, None
    factory = model if callable(model) else partial(create, model)
    with seeded(seed):
        if _shards(plan, dims) and not recipe.lora.rank and plan.tp == plan.ep == 1:
            return made_in_rows(factory, dims)
        return factory(), None


def _partial_sums(module: nn.Module, setup: Setup) -> Callable[[], list[Tensor]] | None:
    """A function that lists the gradients that are partial sums on tensor-parallel ranks; None without these."""
    split = setup.split
    return None if split is None or setup.plan.tp == 1 else lambda: list(partial_gradients(module, split))


def _sharded(module: nn.Module, setup: Setup) -> DataParallel | None:
    """Shard the parameters, if the Plan does. Under O2 the shards are the fp32 masters, gathered in half precision."""
    if not _shards(setup.plan, setup.dims):
        return None
    replicas = shard(module, setup.plan, setup.dims, setup.device, shares=setup.rows)
    return replace(replicas, partial=_partial_sums(module, setup))


def _masters(module: nn.Module, optimizer: Optimizer, setup: Setup) -> MasterWeights | None:
    """Under O2 the optimizer keeps the fp32 weights that it has, and the model gets copies in half precision."""
    numerics, half = setup.numerics, half_type(setup.numerics)
    if numerics.masters != "copy" or half is None or _shards(setup.plan, setup.dims):
        return None
    return MasterWeights([module], [optimizer], half, norms=numerics.norms, lists=numerics.lists)


def _replicated(module: nn.Module, optimizer: Optimizer, setup: Setup) -> DataParallel | None:
    """Average the gradients of replicas that do not shard; None without other replicas."""
    dims, late = setup.dims, partial(gradients_of, optimizer)
    if setup.split is not None:
        # `replicate` cannot hook DTensors, so their gradients are averaged after the passes.
        buffers = running_statistics(module)
        return DataParallel(
            model=module, dims=dims, buffers=buffers, late=late, partial=_partial_sums(module, setup)
        )
    if dims.degree(*LOSS) == 1:
        return None
    # Averaging waits until after all passes if master weights add up the micro-batches' gradients, or if the passes of
    # micro-batches take turns in a pipeline.
    copies = setup.numerics.masters == "copy" and setup.plan.accumulate > 1
    return replicate(module, dims, setup.device, late=late if copies or setup.stages is not None else None)


def _averages(
    module: nn.Module, optimizer: Optimizer, masters: MasterWeights | None, recipe: Recipe
) -> EMA | None:
    if recipe.ema_decay is None:
        return None
    weights, publish = (None, None) if masters is None else (masters.named(module), masters.publish)
    return EMA(module, recipe.ema_decay, optimizer, weights=weights, publish=publish, every_step=True)


def _among_ranks(loss: Loss, plan: Plan, dims: ParallelDims) -> Loss:
    """The loss; if it compares samples, it is wrapped to compare the samples of all ranks."""
    if isinstance(loss, Embedding) and plan.dp != plan.gpus:
        raise ConfigError(
            "The task embedding compares the texts of all ranks, so each rank must have texts of its own and the whole "
            "of their vectors; use plan.tp=1, plan.pp=1 and plan.cp=1."
        )
    if isinstance(loss, Task) and loss.compares and dims.data_world > 1:
        return loss.among(Peers(dims.group(*DATA), dims.data_world, dims.data_rank))
    return loss


def _with_companions(loss: Loss, module: nn.Module, setup: Setup) -> Loss:
    """The loss with the models that it compares with the trained one: a teacher or a reference. Only the loss refers to
    these, so they are not trained or saved."""
    recipe = setup.recipe
    if recipe.teacher is not None and any(getattr(recipe, name) for name in ("teacher_weight", *INSIDE)):
        teacher = open_teacher(loss, module, setup)
        assert isinstance(loss, Task)  # other kinds were refused before
        loss = loss.taught_by(teacher)
    if isinstance(loss, Preferences) and loss.reference is None:
        loss = loss.beside(reference_for(loss, module, setup), recipe.preference_beta)
    return loss


def _optimizer(module: nn.Module, plan: Plan, recipe: Recipe) -> Optimizer:
    if plan.algorithm in ("adamw", "muon") and numerics_of(plan).moments == "fp16" and recipe.eps < _FP16_EPS:
        _log.warning(
            "recipe.eps is %g, but with plan.precision=O3 plan.dtype=fp16 AdamW's second moment is stored in fp16, "
            "where values below 6e-8 are zero: updates would be divided by eps alone and training would end in NaN. "
            "Use recipe.eps=1e-4, or dtype=bf16.",
            recipe.eps,
        )
    groups = parameter_groups(
        module, weight_decay=recipe.weight_decay, layer_decay=recipe.layer_decay, lr_width=recipe.lr_width,
        matrices=OPTIMIZERS[plan.algorithm].matrices == "orthogonal",
    )  # fmt: skip
    return make_optimizer(
        groups, plan.optimizer, plan.algorithm, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps,
        muon_momentum=recipe.muon_momentum,
    )  # fmt: skip


def _scaler(recipe: Recipe, device: torch.device, dims: ParallelDims) -> LossScaler:
    agree = None if dims.alone else agree_over()
    if recipe.loss_scale is None:
        return LossScaler(device, agree=agree)
    constant = recipe.loss_scale
    return LossScaler(device, initial=constant, floor=constant, ceiling=constant, dynamic=False, agree=agree)
