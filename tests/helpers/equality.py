"""Holding a model trained by several ranks to the one that a single process trains on the same batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from helpers import families
from helpers.spawn import pool
from penstock import checkpoint
from penstock.apply import compile_model
from penstock.build import Built, build
from penstock.config.load import to_dict
from penstock.config.model import ModelConfig, ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import Recipe, RunConfig
from penstock.containers import replaced
from penstock.kernels.cross_entropy import IGNORED
from penstock.models import create
from penstock.optim.tensors import local
from penstock.parallel import ParallelDims, dims_of, whole_state
from penstock.shards import whole_of

TINY = ViTConfig(
    image_size=8, patch_size=4, channels=1, width=16, depth=2, heads=2, mlp_width=32, classes=5, qkv_bias=False
)  # fmt: skip
"""Neither 2 nor 4 ranks can share out its 5 classes and 5 positions evenly. Without biases of keys: a softmax is blind
to them, so that their gradients are nothing but rounding, which Adam divides by its own size."""


@dataclass(slots=True)
class Trained:
    """What a few steps left: losses, gradient norms, and every weight whole."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    ema: dict[str, Tensor] = field(default_factory=dict)
    """The averages of the weights."""
    outputs: Tensor | None = None
    """What the model makes of samples that it has not seen."""
    held: int = 0
    """Elements of parameters that this rank holds."""


Batches = Callable[[int, int], Any]
"""Number of a step and how many samples: a batch that can be sliced by `part`."""


def images(step: int, samples: int) -> tuple[Tensor, Tensor]:
    """Images (samples, 1, 8, 8) and classes (samples) of a step, the same on every rank. Every fourth image has no
    class.
    """
    generator = torch.Generator().manual_seed(step)
    shape = (samples, TINY.channels, TINY.image_size, TINY.image_size)
    pictures = torch.randn(shape, generator=generator)
    classes = torch.randint(0, 5, (samples,), generator=generator)
    return pictures, classes.where(torch.arange(samples) % 4 != 3, IGNORED)


def part(batch: Any, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of every tensor of a tuple or mapping."""
    if isinstance(batch, dict):
        return {name: value[start:stop] for name, value in batch.items()}
    return tuple(None if value is None else value[start:stop] for value in batch)


def micro_batches(batch: Any, plan: Plan, rank: int) -> list[Any]:
    """This rank's micro-batches of a global batch, as the Loader deals samples out."""
    size = plan.micro_batch
    starts = [(index * plan.dp + rank) * size for index in range(plan.accumulate)]
    return [part(batch, start, start + size) for start in starts]


def trained(
    model: ModelConfig | nn.Module | Callable[[], nn.Module], plan: Plan, *, steps: int, recipe: Recipe | None = None,
    batches: Batches = images, double: bool = False, dims: ParallelDims | None = None, loss_scale: float = 2.0**10,
    **options: Any,
) -> Trained:  # fmt: skip
    """Train under `plan` in this process, alone or as a rank of the group that stands."""
    built = _built(model, plan, recipe or Recipe(lr=1e-3), dims, loss_scale, options)
    result = Trained()
    take_steps(built, range(steps), batches, result, double=double)
    result.weights = whole_weights(built) if plan.pp == 1 else whole_state(built.model, built.dims)
    return result


def _built(
    model: Any, plan: Plan, recipe: Recipe, dims: ParallelDims | None, loss_scale: float, options: dict[str, Any]
) -> Built:  # fmt: skip
    """fp16 begins with `loss_scale`: at the usual 65536 the first steps may overflow, and not the same ones, for ranks
    scale the loss of a micro-batch and one process its share of it."""
    if dims is None and plan.gpus > 1:
        dims = dims_of(plan, "cpu")
    torch.manual_seed(0)
    built = build(model, plan, recipe=recipe, dims=dims, **options)
    if built.scaler is not None:
        built.scaler.scale.fill_(loss_scale)
    return built


def take_steps(
    built: Built, steps: range, batches: Batches, result: Trained, *, double: bool = False
) -> None:
    """Take steps on this rank's share of their batches, and add to the losses and norms of `result`."""
    plan, dims = built.plan, built.dims
    for step in steps:
        out = built.step(micro_batches(_wide(batches(step, plan.global_batch), double), plan, dims.data_rank))
        loss = out.loss.detach().clone()
        if not dims.alone:
            torch.distributed.all_reduce(loss)
            loss /= dims.size
        result.losses.append(float(loss))
        if out.grad_norm is not None:
            result.norms.append(float(out.grad_norm))


def _wide(batch: Any, double: bool) -> Any:
    return replaced(batch, lambda value: value.double() if double and value.is_floating_point() else value)


def whole_weights(built: Built) -> dict[str, Tensor]:
    """The state dict with every tensor whole, on all ranks."""
    return {name: whole_of(value.detach()).clone() for name, value in built.model.state_dict().items()}


_ALONE = "dp sharding shard offload accumulate tp sp pp schedule virtual cp cp_exchange ep"


def alone(plan: Plan, **changes: Any) -> Plan:
    """The Plan of a single process that takes all samples of a step at once."""
    plain = {name: getattr(Plan(), name) for name in _ALONE.split()}
    return replace(plan, **plain | {"micro_batch": plan.global_batch} | changes)


def beside_one(
    said: str, make: Callable[[], Any], plan: Plan, known: dict[tuple[str, Plan], Trained], **options: Any
) -> tuple[str, Trained, Trained]:
    """What the ranks learn, one of which this is, and on rank 0 what one process learns in the plainest way. `said` is
    a model and a line; `known` keeps what one process learned of a model."""
    got = trained(make(), plan, **options)
    key = said.partition(": ")[0], alone(plan, recompute="none", compile="none", loss="whole", fuse=())
    if torch.distributed.get_rank() == 0 and key not in known:
        known[key] = trained(make(), key[1], **options)
    return said, got, known.get(key, Trained())


def beside_each(
    name: str, make: Callable[[], Any], lines: Iterable[str], **options: Any
) -> list[tuple[str, Trained, Trained]]:
    """The same under each of some lines."""
    known = dict[tuple[str, Plan], Trained]()
    return [beside_one(f"{name}: {line}", make, Plan.parse(line), known, **options) for line in lines]


class Close(NamedTuple):
    """How far results may be apart. With `reach`, how far the optimizer can have moved an element, each tensor is held
    as a whole: its difference against its norm or that reach, because single elements tell of rounding."""

    rtol: float
    atol: float
    reach: float | None = None

    def hold(self, said: str, got: Any, expected: Any) -> None:
        """Raises AssertionError with what was compared."""
        if self.reach is None:
            torch.testing.assert_close(
                got, expected, rtol=self.rtol, atol=self.atol, msg=lambda text: f"{said}: {text}"
            )
        elif expected.is_floating_point():
            error = float((got.double() - expected.double()).norm())
            far = max(float(expected.double().norm()), self.reach * expected.numel() ** 0.5)
            assert error <= self.rtol * far + self.atol, f"{said} differs by {error:.1e} of {far:.1e}"


WEIGHTS, FIGURES = Close(1e-3, 2e-5), Close(1e-4, 1e-5)
"""Of fp32: ranks add up gradients in another order, and Adam divides by their size."""


def hold(
    said: str, got: Trained, expected: Trained, *, weights: Close = WEIGHTS, figures: Close = FIGURES,
    norms: Close | None = None,
) -> None:  # fmt: skip
    """Hold what ranks learned to what one process did: losses and outputs within `figures`, gradient norms within
    `norms`, weights and averages within `weights`."""
    for kind in ("weights", "ema"):
        mine, theirs = getattr(got, kind), getattr(expected, kind)
        assert mine.keys() == theirs.keys(), f"{said}: {kind}"
        for name, value in theirs.items():
            weights.hold(f"{said}: {kind} {name}", mine[name], value)
    hold_figures(said, got, expected, figures=figures, norms=norms)


def hold_figures(
    said: str, got: Trained, expected: Trained, *, figures: Close = FIGURES, norms: Close | None = None
) -> None:
    """The same of what all ranks know."""
    figures.hold(f"{said}: losses", got.losses, expected.losses)
    (norms or figures).hold(f"{said}: norms", got.norms, expected.norms)
    if expected.outputs is not None:
        assert got.outputs is not None
        figures.hold(f"{said}: outputs", got.outputs.double(), expected.outputs.double())


def hold_both_ends(found: list[list[tuple[str, Trained, Trained]]]) -> None:
    """Hold what the first rank and the last made of some lines, which have the first and the last stage."""
    for (said, got, expected), (_, last, _) in zip(found[0], found[-1], strict=True):
        hold(said, got, expected)
        hold_figures(said, last, expected)


# -- Layouts of a family's model, one by one


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model of `helpers.families` to be trained under layouts."""

    config: ModelConfig
    recipe: Recipe
    loss: Any = families.loss
    double: bool = True
    backend: str | None = None
    """What compiles in place of inductor."""

    def batches(self, step: int, samples: int) -> Any:
        """Those of its family."""
        return families.batches(self.config, step, samples)

    def built(self, line: str) -> Built:
        """The model under a Plan, in this process alone or as one of its ranks."""
        made: Any = partial(_double, self.config) if self.double else self.config
        return _built(made, Plan.parse(line), self.recipe, None, 2.0**8, {"loss": self.loss})


def _double(config: ModelConfig) -> nn.Module:
    return create(config).double()


def learned(job: Job, line: str, steps: int = 3) -> Trained:
    """What it learns in a few steps, with averages, and what it then makes of three samples. Weights are on rank 0."""
    compiled = mock.patch("penstock.apply.compile_model", partial(compile_model, backend=job.backend))
    with compiled if job.backend else contextlib.nullcontext():
        built, result = job.built(line), Trained()
        take_steps(built, range(steps), job.batches, result, double=job.double)
        with built.inference():
            result.outputs = families.flat(built.model(*_wide(job.batches(99, 3), job.double)[:-1]))
    result.weights = whole_state(built.model, built.dims)
    assert built.ema is not None
    with built.ema.swapped():
        result.ema = whole_state(built.model, built.dims)
    result.held = sum(local(p.detach()).numel() for p in built.model.parameters())
    return result


EXACT = Close(1e-7, 1e-9)
"""Of fp64."""


def compare(
    job: Job, line: str, *, weights: Close = EXACT, figures: Close = EXACT, outputs: bool = True,
    splits: bool = False, seconds: float = 60.0,
) -> None:  # fmt: skip
    """Hold all ranks of a layout to one process. Where it `splits` the model, each rank holds a part."""
    plan = Plan.parse(line)
    single = alone(plan, recompute="none", budget=Plan().budget, compile="none")
    expected = learned(job, single.line())
    expected.outputs = expected.outputs if outputs else None
    first, *others = found = pool(plan.gpus).run(learned, job, line, timeout=seconds)
    hold(line, first, expected, weights=weights, figures=figures)
    for one in others:
        hold_figures(line, one, expected, figures=figures)
        assert not one.weights
        assert not one.ema
    assert not splits or all(one.held < expected.held for one in found)


def went_on(job: Job, line: str, folder: Path, save: bool) -> Trained:
    """Two steps and a save, or a start from it; then two steps more, and the weights that they left, on rank 0."""
    built, result = job.built(line), Trained()
    assert built.ema is not None
    if save:
        take_steps(built, range(2), job.batches, Trained(), double=job.double)
        weights = {"weights": built.model.state_dict(), "ema": built.ema.state_dict()}
        state = {"optimizer": checkpoint.by_name(built.optimizer.state_dict())}
        settings = to_dict(RunConfig(model=job.config))
        checkpoint.save(folder, checkpoint.Snapshot(2, weights, state, settings))
    else:
        stored = checkpoint.find(folder)
        assert stored is not None
        parameters = dict(built.model.named_parameters(remove_duplicate=False))
        dims = built.dims
        held = {*parameters, *built.model.state_dict()}
        loaded = stored.load(parameters, rank=dims.rank, world=dims.size, held=held)
        built.model.load_state_dict(loaded.weights["weights"])
        built.ema.load_state_dict(loaded.weights["ema"])
        state = checkpoint.by_index(loaded.state["optimizer"], built.optimizer.state_dict())
        built.optimizer.load_state_dict(state)
    take_steps(built, range(2, 4), job.batches, result, double=job.double)
    result.weights = whole_state(built.model, built.dims)
    return result


def goes_on_elsewhere(job: Job, before: str, after: str, folder: Path, close: Close) -> None:
    """Hold that a run saved under one Plan goes on under another as it would have, to the bit under the same one."""

    def on(line: str, save: bool) -> Trained:
        ranks = Plan.parse(line).gpus
        return (
            went_on(job, line, folder, save)
            if ranks == 1
            else pool(ranks).run(went_on, job, line, folder, save)[0]
        )

    undisturbed, resumed = on(before, True), on(after, False)
    if before == after:
        close = Close(0.0, 0.0)
    hold(f"{before} → {after}", resumed, undisturbed, weights=close, figures=close)
