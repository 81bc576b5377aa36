"""THE ORDER in which a Plan is applied to a model, as data: read `STEPS` from top to bottom.

Each step has its action, its purposes, its condition, and the reason for its place. Training (`penstock.build`), a
teacher, the reference of preferences, opening a model for inference, `penstock.accelerate` and `penstock run` call
`apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as copy_with
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.config.formats import PRODUCTS, Products, StoredFormat, Weights
from penstock.config.fused import FusedName
from penstock.config.model import ModelConfig
from penstock.config.numerics import Numerics, numerics_of
from penstock.config.plan import SWITCHES, Plan
from penstock.config.run import Recipe
from penstock.decode.stages import cut
from penstock.errors import ConfigError
from penstock.models.anatomy import anatomy_of, let_recompile, set_switches
from penstock.models.block import ExpertSamples
from penstock.models.draw import seeded
from penstock.models.fuse import fuse
from penstock.models.heads import set_z_loss
from penstock.models.lora import add_adapters, store_base
from penstock.models.rounded import RoundedWeight
from penstock.models.wrap import find
from penstock.optim.groups import freeze
from penstock.parallel import ALONE, ParallelDims
from penstock.parallel.context import split_tokens
from penstock.parallel.data import broadcast
from penstock.parallel.dims import LOSS
from penstock.parallel.hosts import Slots, host_experts
from penstock.parallel.offload import offload_blocks
from penstock.parallel.parts import rounded_parts
from penstock.parallel.pipeline import Stages, cut_stages, split_backwards
from penstock.parallel.recompute import recompute_blocks
from penstock.parallel.sharded_init import move_present
from penstock.parallel.stage_cut import counts_by_size
from penstock.parallel.tensor import Split, split_layers
from penstock.planner.describe import totals
from penstock.planner.pipeline import stage_counts
from penstock.precision.forward import apply_precision
from penstock.precision.master import cast_in_place
from penstock.precision.settings import half_type
from penstock.products.blocks import join_blocks
from penstock.products.convert import convert_linears, store_linears, suited
from penstock.products.rounded import store_rounded
from penstock.products.shortlist import shorten

Purpose = Literal["training", "teacher", "reference", "inference", "script"]
TRAINING: Purpose = "training"
TEACHER: Purpose = "teacher"
"""A model from which another one learns."""
REFERENCE: Purpose = "reference"
"""The initial model of training by preferences, which must round like the trained one."""
INFERENCE: Purpose = "inference"
SCRIPT: Purpose = "script"
"""A model that a user's script trains: with `penstock.accelerate`, or under `penstock run`."""
_UNTRAINED = (TEACHER, INFERENCE)


@dataclass(slots=True, kw_only=True)
class Setup:
    """The purpose of applying a Plan, and the inputs of the steps; their results are the last fields."""

    purpose: Purpose
    device: torch.device
    plan: Plan = field(default_factory=Plan)
    numerics: Numerics = field(default_factory=lambda: numerics_of(Plan()))
    dims: ParallelDims = ALONE
    # In training
    recipe: Recipe = field(default_factory=Recipe)
    config: ModelConfig | None = None
    seed: int = 0
    rows: dict[str, Tensor] | None = None
    """This rank's rows, by name, of parameters on the meta device that will be sharded; None: all are in memory."""
    load: Callable[[nn.Module], Any] | None = None
    """Loads the weights of a reference."""
    # In inference
    weights: Weights | Products = "plain"
    rounded: Mapping[str, tuple[StoredFormat, RoundedWeight]] = field(default_factory=dict)
    """Quantised weights in the model's folder, by the names of their linears."""
    loaded: bool = True
    """Whether the model was loaded for this purpose, so that all ranks have the same weights, and `weights=auto` may
    choose the processor's layout."""
    exact_outputs: bool = False
    """Whether the values of outputs matter, and not only which is the largest."""
    shortlist: Sequence[int] = ()
    """The tokens for which logits are computed; empty: all."""
    slots: Sequence[Slots] = ()
    """Experts that each rank hosts; empty: the same number on each."""
    companion: nn.Module | None = None
    """Another model that is served together with this one."""
    # In a script
    named: frozenset[str] | None = None
    """The settings of the Plan that are applied to a script; None: all."""
    compiled: bool = False
    """Whether the script compiles the model itself."""
    cast_together: Sequence[nn.Module] = ()
    """Models that may share weights with this one, and are cast with it."""

    parameters: int = 0
    """Number of parameters of the whole model, including other stages."""
    split: Split | None = None
    stages: Stages | None = None
    fused: dict[FusedName, int] = field(default_factory=dict)
    """Number of modules that use each fused operator."""

    @property
    def place(self) -> torch.device | None:
        """The device where the model will be; None: a script's model stays where it is."""
        return None if self.purpose == SCRIPT else self.device

    def beside(self, purpose: Purpose, **changes: Any) -> Setup:
        """The setup of a companion, such as a teacher: a whole model under the same Plan."""
        emptied: dict[str, Any] = {"parameters": 0, "split": None, "stages": None, "fused": {}, "rows": None}
        return copy_with(self, purpose=purpose, **{**emptied, **changes})


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """One step of the order."""

    name: str
    run: Callable[[Any, Any], Any]
    """Changes a model in place, given the model and a `Setup`, or returns the module that replaces it."""
    purposes: tuple[Purpose, ...]
    why: str
    """The reason for its place in the order."""
    when: Callable[[Any], Any] = lambda _: True
    settings: tuple[str, ...] = ()
    """Fields of the Plan that it applies."""


def apply(model: nn.Module, setup: Setup, *names: str) -> Any:
    """Apply a Plan to a model: run all steps for the setup's purpose, or only those with these names, in order; returns
    the model, or the module that replaces it. A script's model is changed in place. Raises ConfigError if a step cannot
    be applied to the model.
    """
    for step in STEPS:
        if setup.purpose in step.purposes and (not names or step.name in names) and step.when(setup):
            made = step.run(model, setup)
            model = made if isinstance(made, nn.Module) else model
    return model


def settings_for(purpose: Purpose) -> tuple[str, ...]:
    """The Plan's fields that the steps for a purpose apply."""
    return tuple(name for step in STEPS if purpose in step.purposes for name in step.settings)


def compile_model(model: nn.Module, plan: Plan, **options: Any) -> None:
    """Compile as `plan.compile` says, in place, so that no name in the state dict changes.

    `blocks` compiles each repeated block of the model's Anatomy: they share compiled code, so one compilation is enough
    and takes a fraction of the time of `whole`. `graphs` is `whole` with torch's CUDA graph trees: the next step
    overwrites outputs and gradients. `options` go to torch.compile. Raises ConfigError for unknown blocks.
    """
    if plan.compile == "none":
        return
    let_recompile()
    options = {"dynamic": False, **options}
    if plan.compiles_whole:
        from penstock.kernels.embedding_gradient import AddTouchedRows  # late: Inductor takes a second

        if "backend" not in options and "mode" not in options:
            passes: dict[str, Any] = {"post_grad_custom_pre_pass": AddTouchedRows()}
            if plan.compile == "graphs":  # `cudagraph_or_error`: torch raises where it cannot record
                passes |= {"triton.cudagraphs": True, "triton.cudagraph_or_error": True}
            options["options"] = {**passes, **options.get("options", {})}
        model.compile(**options)
        return
    for block in anatomy_of(model).block_modules(model):
        # The number of samples of an expert's block changes from step to step.
        varies = find(block, ExpertSamples) is not None
        block.compile(**({**options, "dynamic": None} if varies else options))


def _add_adapters(model: nn.Module, setup: Setup) -> None:
    if PRODUCTS[setup.plan.products].clips:
        raise ConfigError(
            f"plan.products={setup.plan.products} learns how inputs of whole weights are clipped, and recipe.lora "
            "adds adapters to these later; use products=int8, or set recipe.lora.rank to 0."
        )
    with seeded(setup.seed):
        add_adapters(model, setup.recipe.lora)


def _count(model: nn.Module, setup: Setup) -> None:
    setup.parameters = sum(parameter.numel() for parameter in model.parameters())


def _convert(model: nn.Module, setup: Setup) -> None:
    convert_linears(model, setup.numerics.products, device=setup.place)


def _choose_libraries(model: nn.Module, setup: Setup) -> None:
    from penstock.probe.libraries import choose_libraries  # late: few Plans need a probe

    choose_libraries(model, setup.device, setup.dims)


def _casts(setup: Setup) -> bool:
    """Whether weights become half here: with masters this happens once the optimizer has the fp32 weights."""
    numerics = setup.numerics
    if setup.purpose in _UNTRAINED:
        return numerics.half
    return numerics.weights != "fp32" and (setup.purpose == REFERENCE or numerics.masters == "none")


def _cast(model: nn.Module, setup: Setup) -> nn.Module | None:
    numerics, half = setup.numerics, half_type(setup.numerics)
    assert half is not None
    if setup.purpose not in (REFERENCE, SCRIPT):
        return model.to(dtype=half)
    # Cast as with master weights: a reference rounds like the model, and a script's state dicts stay fp32.
    models = setup.cast_together or [model]
    cast_in_place(models, half, norms=numerics.norms, lists=numerics.lists)
    return None


def _agree(model: nn.Module, setup: Setup) -> None:
    for names in ("pp",), ("tp",), LOSS:
        if setup.dims.degree(*names) > 1:
            broadcast(model, setup.dims, names)


def _host(model: nn.Module, setup: Setup) -> None:
    host_experts(model, setup.dims, setup.device, slots=setup.slots, beside=setup.companion)


def _split(model: nn.Module, setup: Setup) -> None:
    if setup.purpose == INFERENCE:  # experts are hosted by `_host`, and there is no backward pass
        split_layers(model, Plan(tp=setup.dims.tp), setup.dims, alike=True)
    else:
        setup.split = split_layers(model, setup.plan, setup.dims, alike=setup.config is not None)


def _cut(model: nn.Module, setup: Setup) -> None:
    plan, rows = setup.plan, setup.rows
    if setup.purpose == INFERENCE:
        cut(model, setup.dims)
        return
    count, config = plan.pp * plan.virtual, setup.config
    counts = counts_by_size(model, count) if config is None else stage_counts(totals(config), count)
    setup.stages = cut_stages(model, counts, setup.dims, setup.device, fixed=plan.padding == "keep")
    if rows is not None:
        setup.rows = {name: rows[name] for name, _ in model.named_parameters() if name in rows}


def _switch(model: nn.Module, setup: Setup) -> None:
    plan, names = setup.plan, setup.named
    if setup.purpose == INFERENCE:
        names = frozenset({"attention"})
        if plan.attention == "sdpa":
            if setup.device.type != "cpu":
                return
            plan = copy_with(plan, attention="auto")
    set_switches(model, plan, names)


def _fuse(model: nn.Module, setup: Setup) -> None:
    names, compiled = setup.plan.fuse, setup.compiled or setup.plan.compile != "none"
    setup.fused = fuse(model, names, device=setup.place, dtype=half_type(setup.numerics), compiled=compiled)


def _compile(model: nn.Module, setup: Setup) -> None:
    if setup.plan.compile == "graphs" and (setup.purpose == SCRIPT or setup.device.type != "cuda"):
        raise ConfigError("plan.compile=graphs is for steps that Penstock runs on a GPU; use compile=whole.")
    # The lengths of a script's batches may vary: shapes that change are compiled as dynamic.
    compile_model(model, setup.plan, **({"dynamic": None} if setup.purpose == SCRIPT else {}))


def _store(model: nn.Module, setup: Setup) -> nn.Module:
    return store_linears(model, suited(model, setup.weights, own=setup.loaded), careful=setup.exact_outputs)


_TRAINED = (TRAINING, REFERENCE, SCRIPT)
_COMPUTES = (TRAINING, TEACHER, REFERENCE, SCRIPT)
STEPS = (
    ApplyStep(
        "adapters", _add_adapters, (TRAINING,), when=lambda s: s.recipe.lora.rank,
        why="Adapters are linear layers, and later steps treat them as parts of the model.",
    ),
    ApplyStep("count", _count, (TRAINING,), why="Here the model is whole, with all parameters that will learn."),
    ApplyStep(
        "z-loss", lambda model, s: set_z_loss(model, s.recipe.z_loss), (TRAINING,), when=lambda s: s.recipe.z_loss,
        why="On the whole model, so that every rank finds the head, or every rank reports that there is none.",
    ),
    ApplyStep(
        "base", lambda model, s: store_base(model, s.recipe.lora), (TRAINING,),
        why="By names of the whole model, before a weight is on the device. Weights that are loaded later are rounded.",
    ),
    ApplyStep(
        "products", _convert, _TRAINED, settings=("products",), when=lambda s: s.numerics.products != "plain",
        why="Before weights are loaded, which may have clips of inputs, and before layers are split and compiled.",
    ),
    ApplyStep(
        "load", lambda model, s: s.load(model), (REFERENCE,), when=lambda s: s.load,
        why="Into fp32, so that the cast rounds the weights from which training starts.",
    ),
    ApplyStep(
        "cast", _cast, (*_TRAINED, *_UNTRAINED), settings=("precision", "dtype", "norms"), when=_casts,
        why="Before the move to the device, and before anything keeps a reference to a parameter.",
    ),
    ApplyStep(
        "agree", _agree, (INFERENCE,), when=lambda s: not (s.loaded or s.dims.alone),
        why="Rank 0 sends weights while they are whole, in the type in which they are used.",
    ),
    ApplyStep("hosts", _host, (INFERENCE,), when=lambda s: s.dims.ep > 1, why="Experts go to their hosts whole."),
    ApplyStep(
        "split", _split, (TRAINING, INFERENCE), settings=("tp", "sp", "ep", "tp_overlap"),
        when=lambda s: s.dims.tp > 1 or (s.purpose == TRAINING and s.dims.ep > 1),
        why="On the host, so that each device receives only its part of a split layer.",
    ),
    ApplyStep(
        "freeze", lambda model, s: freeze(model, s.recipe.freeze), (TRAINING,),
        why="By names of the whole model, before recomputation, shards and the optimizer ask which parameters learn.",
    ),
    ApplyStep(
        "stages", _cut, (TRAINING, INFERENCE), settings=("pp", "virtual"), when=lambda s: s.dims.pp > 1,
        why="A rank drops the blocks of other stages before anything else is put around them.",
    ),
    ApplyStep(
        "precision", lambda model, s: apply_precision(model, s.numerics, s.device), _TRAINED,
        why="It wraps the class's own forward, before other steps wrap it.",
    ),
    ApplyStep(
        "device", lambda model, s: model.to(s.device) if s.rows is None else move_present(model, s.device),
        (TRAINING, TEACHER, REFERENCE, INFERENCE),
        why="The model now has only this rank's parameters, in their final type.",
    ),
    ApplyStep("mode", lambda model, _: model.train(), (TRAINING,), why="Before anything is compiled in one mode."),
    ApplyStep(
        "backwards", lambda model, _: split_backwards(model), (TRAINING,), settings=("schedule",),
        when=lambda s: s.plan.schedule == "zero_bubble",
        why="For linears whose class is settled, and before blocks are compiled.",
    ),
    ApplyStep(
        "libraries", _choose_libraries, _COMPUTES, settings=("matmul",), when=lambda s: s.plan.matmul == "probed",
        why="For linears that are still of torch's own class, where the weights are on their device.",
    ),
    ApplyStep(
        "switches", _switch, (*_COMPUTES, INFERENCE), settings=(*SWITCHES,),
        why="The functions that blocks call are chosen before blocks are compiled.",
    ),
    ApplyStep(
        "fuse", _fuse, _COMPUTES, settings=("fuse",), when=lambda s: s.plan.fuse,
        why="It looks for operators by classes and switches, which are settled; before blocks are compiled.",
    ),
    ApplyStep(
        "tokens", lambda model, s: split_tokens(model, s.plan, s.dims), (TRAINING,),
        settings=("cp", "cp_exchange"), when=lambda s: s.plan.cp > 1,
        why="It wraps attention in the form that switches and splitting gave it.",
    ),
    ApplyStep(
        "attach", lambda _, s: s.stages.attach(), (TRAINING,), when=lambda s: s.stages,
        why="From here on, a call of the model runs its stages: after all steps that replace its forward.",
    ),
    ApplyStep(
        "recompute", lambda model, s: recompute_blocks(model, s.plan, s.config, s.device), (TRAINING, SCRIPT),
        settings=("recompute", "recompute_every", "budget"), when=lambda s: s.plan.recompute != "none",
        why="Before compilation, which then covers it, and before FSDP, so that weights are gathered once for both.",
    ),
    ApplyStep(
        "offload", lambda model, s: offload_blocks(model, s.device, keep_last=s.stages is None),
        (TRAINING, SCRIPT), settings=("offload",), when=lambda s: s.plan.offload == "activations",
        why="It wraps recomputation, so that the stored inputs of recomputed blocks are offloaded too.",
    ),
    ApplyStep(
        "compile", _compile, _COMPUTES, settings=("compile",), when=lambda s: s.plan.compile != "none",
        why="After all steps that change the computation, and before parameters are sharded.",
    ),
    ApplyStep(
        "shortlist", lambda model, s: shorten(model, s.shortlist), (INFERENCE,),
        when=lambda s: s.shortlist,
        why="It takes rows of the output's weight, which is stored later.",
    ),
    ApplyStep(
        "rounded", lambda model, s: store_rounded(model, rounded_parts(model, s.rounded, s.dims)), (INFERENCE,),
        when=lambda s: s.rounded,
        why="It replaces linears that are still plain, so that their quantised values are kept exactly.",
    ),
    ApplyStep(
        "store", _store, (INFERENCE,), when=lambda s: s.weights != "plain",
        why="On the device, whose memory layout the weights get.",
    ),
    ApplyStep("join", lambda model, _: join_blocks(model), (INFERENCE,), why="It joins linears in their final form."),
)  # fmt: skip
"""The order. Afterwards `penstock.build` makes objects of parameters: shards, the optimizer, masters, replicas."""
