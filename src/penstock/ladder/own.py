"""A user's own model on the ladder, as returned by a factory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.apply import TRAINING, Setup, apply
from penstock.build import Built, build
from penstock.config.numerics import numerics_of
from penstock.config.plan import Padding, Plan
from penstock.config.run import Recipe
from penstock.containers import replaced
from penstock.errors import ConfigError
from penstock.kernels.sdpa import Switch, Watch
from penstock.ladder.factory import (
    Factory,
    can_switch,
    drawn_anew,
    load_factory,
    made_by,
    padding_of,
    path_of,
    samples_of,
)
from penstock.ladder.rung import Setting
from penstock.ladder.settings import LadderConfig
from penstock.ladder.subject import Configured, Subject
from penstock.ladder.trace import trace
from penstock.models.anatomy import anatomy_of
from penstock.models.fuse import places_for
from penstock.planner.operators import Workload
from penstock.tasks import Loss, mean_loss


class Own(Subject):
    """A user's own model, with the same batch at every step. Other micro-batches and ranks redraw its samples."""

    unit, data = "samples", "the factory's batch"

    def __init__(self, factory: Factory, name: str, config: LadderConfig, device: torch.device) -> None:
        self.title = name
        self.path = config.factory or path_of(factory)
        self.procs = config.procs
        self.device = device
        self.recipe = Recipe(lr=config.lr)
        self._factory = factory
        model, self._batch, self._loss = self._make(config.seed)
        self._samples = samples_of(self._batch)
        self.splittable = self._samples is not None
        self.first = Setting(model=None, plan=Plan(micro_batch=self._samples or 1))
        self.switches = self._switches_of(model)
        if "remove" in self.switches["padding"]:
            self.padding_share = padding_of(self._batch)
        self._traces: dict[tuple[Any, ...], Workload] = {}

    def build(self, setting: Setting, seed: int) -> Built:
        model, _, loss = self._make(seed)
        return build(model, setting.plan, device=self.device, recipe=self.recipe, loss=loss, seed=seed)

    def batches(self, setting: Setting, seed: int) -> Iterator[Any]:
        plan = setting.plan
        batch, dims = self._enlarged(plan.micro_batch), self.dims(plan)
        places = range(dims.data_rank, plan.accumulate * dims.data_world, dims.data_world)
        return itertools.cycle([drawn_anew(batch, plan.micro_batch, place) for place in places])

    def workload(self, setting: Setting) -> Workload:
        """The work of the model, traced in fp32 once per batch size and per setting that changes its operators."""
        plan = setting.plan
        auto = (plan.precision, plan.dtype, plan.compile) if "auto" in plan.fuse else ()
        key = plan.micro_batch, plan.loss, plan.padding, plan.fuse, auto
        if key not in self._traces:
            model, _, loss = self._make(0)
            _let_compute(model, plan, self.device)
            batch = self._enlarged(plan.micro_batch)
            self._traces[key] = trace(
                model.to(self.device),
                batch,
                partial(mean_loss, loss),
                plan.micro_batch,
                units=_blocks_in(model),
            )
        return self._traces[key]

    def model_flops(self, setting: Setting) -> int:
        """FLOPs for tokens that are not padding, even if padding is computed, as far as the model can skip it."""
        padding: Padding = "remove" if self.padding_share else "keep"
        plain = replace(setting.plan, loss="whole", padding=padding, fuse=())
        return super().model_flops(replace(setting, plan=plain))

    def train_command(self, setting: Setting) -> str:
        plan = setting.plan.line()
        ranks = f", on each of {setting.plan.gpus} ranks" if setting.plan.gpus > 1 else ""
        return (
            f'penstock.build.build(model, penstock.Plan.parse("{plan}"), loss=loss)  '
            f"# model of {self.title}{ranks}"
        )

    def _make(self, seed: int) -> tuple[nn.Module, Any, Loss]:
        return made_by(self._factory, self.title, seed)

    def _switches_of(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """The values that each switch of the model supports; none for attention if the model never calls torch's."""
        switch = Switch("sdpa")
        with torch.no_grad(), torch.random.fork_rng(devices=[]), Watch(switch):
            self._loss(model.to(self.device), self._enlarged(self.first.plan.micro_batch))
        return {
            name: tuple(
                v for v in values if (switch.used or name != "attention") and can_switch(model, name, v)
            )
            for name, values in self.switches.items()
        }

    def _enlarged(self, size: int) -> Any:
        """The example batch on the device, repeated to `size` samples."""
        times = size // (self._samples or 1)

        def move(leaf: Tensor) -> Tensor:
            leaf = leaf.to(self.device)
            grows = times > 1 and leaf.ndim > 0 and leaf.shape[0] == self._samples
            return torch.cat([leaf] * times) if grows else leaf

        return replaced(self._batch, move)


def subject_of(config: LadderConfig, factory: str | Factory | None, device: torch.device) -> Subject:
    """The subject of a configuration, or of a factory function in place of its path."""
    if callable(factory):
        return Own(factory, getattr(factory, "__qualname__", "factory"), config, device)
    if config.factory is not None:
        return Own(load_factory(config.factory), config.factory, config, device)
    return Configured(config, device)


def _let_compute(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Apply the Plan's settings that change operators. Fused operators are applied only if they fit; a Plan that names
    others is refused when it is built."""
    fits = places_for(model, device.type)
    names = tuple(name for name in plan.fuse if (any(fits.values()) if name == "auto" else fits[name]))
    changes = Plan(loss=plan.loss, padding=plan.padding, fuse=names, compile=plan.compile)
    setup = Setup(purpose=TRAINING, plan=changes, numerics=numerics_of(plan), device=device)
    apply(model, setup, "switches", "fuse")


def _blocks_in(model: nn.Module) -> int:
    """Number of repeated blocks, which are gathered separately when weights are sharded; 1 if none are found."""
    try:
        return len(anatomy_of(model).blocks)
    except ConfigError:
        return 1
