"""A user's own model on the ladder: the function that makes it, its batch at any size, and the subject to measure."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
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
from penstock.containers import replaced, tensors
from penstock.data.transform import load_function
from penstock.errors import ConfigError
from penstock.kernels.sdpa import Switch, Watch
from penstock.ladder.rung import Setting
from penstock.ladder.settings import LadderConfig
from penstock.ladder.subject import Configured, Subject
from penstock.ladder.trace import number_of_blocks, supported_switches, trace
from penstock.models.draw import seeded
from penstock.models.fuse import places_for
from penstock.planner.operators import Workload
from penstock.tasks import Loss, mean_loss

Factory = Callable[[], tuple[nn.Module, Any, Loss]]
"""A function that returns a model, an example batch, and loss(model, batch)."""


class Own(Subject):
    """A user's own model, with the same batch at every step. Other micro-batches and ranks redraw its samples."""

    unit, data = "samples", "the factory's batch"

    def __init__(self, factory: Factory, name: str, config: LadderConfig, device: torch.device) -> None:
        """Raises ConfigError if the factory does not return a model, a batch and a loss."""
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
        switch = Switch("sdpa")
        with torch.no_grad(), torch.random.fork_rng(devices=[]), Watch(switch):
            self._loss(model.to(device), self._enlarged(self.first.plan.micro_batch))
        self.switches = supported_switches(model, self.switches, attention=switch.used)
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
        return itertools.cycle([redrawn(batch, plan.micro_batch, place) for place in places])

    def workload(self, setting: Setting) -> Workload:
        """The work of the model, traced in fp32 once per batch size and per setting that changes its operators."""
        plan = setting.plan
        auto = (plan.precision, plan.dtype, plan.compile) if "auto" in plan.fuse else ()
        key = plan.micro_batch, plan.loss, plan.padding, plan.fuse, auto
        if key not in self._traces:
            model, _, loss = self._make(0)
            self._change_operators(model, plan)
            batch = self._enlarged(plan.micro_batch)
            self._traces[key] = trace(
                model.to(self.device), batch, partial(mean_loss, loss), plan.micro_batch, units=number_of_blocks(model)
            )  # fmt: skip
        return self._traces[key]

    def model_flops(self, setting: Setting) -> int:
        """FLOPs for tokens that are not padding, even if padding is computed, as far as the model can skip it."""
        padding: Padding = "remove" if self.padding_share else "keep"
        plain = replace(setting.plan, loss="whole", padding=padding, fuse=())
        return super().model_flops(replace(setting, plan=plain))

    def train_command(self, setting: Setting) -> str:
        call = f'penstock.build.build(model, penstock.Plan.parse("{setting.plan.line()}"), loss=loss)'
        ranks = f", on each of {setting.plan.gpus} ranks" if setting.plan.gpus > 1 else ""
        return f"{call}  # model of {self.title}{ranks}"

    def _make(self, seed: int) -> tuple[nn.Module, Any, Loss]:
        """The factory's model, batch and loss. The model is copied, because a factory may return the same one twice."""
        with seeded(seed):
            parts = self._factory()
        if not (
            isinstance(parts, tuple)
            and len(parts) == 3
            and isinstance(parts[0], nn.Module)
            and callable(parts[2])
        ):
            raise ConfigError(
                f"The factory {self.title} returned {type(parts).__name__}, but must return three things: a "
                "torch.nn.Module, an example batch, and a function loss(model, batch) that returns a scalar tensor, or "
                "(sum, count)."
            )
        model, batch, loss = parts
        return copy.deepcopy(model).train(), batch, loss

    def _change_operators(self, model: nn.Module, plan: Plan) -> None:
        """Apply the Plan's settings that change operators. Fused operators are applied only if they fit; a Plan that
        names others is refused when it is built."""
        fits = places_for(model, self.device.type)
        names = tuple(name for name in plan.fuse if (any(fits.values()) if name == "auto" else fits[name]))
        changes = Plan(loss=plan.loss, padding=plan.padding, fuse=names, compile=plan.compile)
        setup = Setup(purpose=TRAINING, plan=changes, numerics=numerics_of(plan), device=self.device)
        apply(model, setup, "switches", "fuse")

    def _enlarged(self, size: int) -> Any:
        """The example batch on the device, repeated to `size` samples."""
        times = size // (self._samples or 1)

        def move(leaf: Tensor) -> Tensor:
            leaf = leaf.to(self.device)
            grows = times > 1 and leaf.ndim > 0 and leaf.shape[0] == self._samples
            return torch.cat([leaf] * times) if grows else leaf

        return replaced(self._batch, move)


def subject_of(config: LadderConfig, factory: str | Factory | None, device: torch.device) -> Subject:
    """The subject of a configuration, or of a factory function in place of its path. Raises ConfigError for a path
    without a function; the working directory is searched too."""
    if callable(factory):
        return Own(factory, getattr(factory, "__qualname__", "factory"), config, device)
    if config.factory is not None:
        return Own(load_function(config.factory, "factory"), config.factory, config, device)
    return Configured(config, device)


def path_of(factory: Factory) -> str | None:
    """`package.module:name` of a function that another process can import; None if it cannot."""
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", "")
    if module in (None, "__main__") or getattr(sys.modules.get(str(module)), name, None) is not factory:
        return None
    try:
        spec = importlib.util.find_spec(str(module))
    except (ImportError, ValueError):
        return None
    return f"{module}:{name}" if spec is not None else None


def redrawn(batch: Any, size: int, place: int) -> Any:
    """The batch for micro-batch `place` of a step: the first is the batch itself, later ones redraw its samples."""
    if place == 0 or samples_of(batch) != size:
        return batch
    chosen = torch.randint(size, (size,), generator=torch.Generator().manual_seed(place))
    return replaced(batch, lambda leaf: leaf[chosen.to(leaf.device)] if leaf.ndim > 0 else leaf)


def padding_of(batch: Any) -> float:
    """Share of padding among the tokens, from the `attention_mask` of a transformers batch; 0 without a mask."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not mask.numel():
        return 0.0
    return 1.0 - (mask != 0).float().mean().item()


def samples_of(batch: Any) -> int | None:
    """Number of samples: the size of the first dimension, if all tensors of the batch have the same; else None."""
    sizes = {leaf.shape[0] for leaf in tensors(batch) if leaf.ndim > 0}
    return int(sizes.pop()) if len(sizes) == 1 else None
