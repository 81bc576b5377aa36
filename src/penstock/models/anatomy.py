"""The parts of a model, as data: stacks of blocks whose parts have roles.

A family is enrolled with `enrol`, by the class path of its module, so that foreign libraries are never imported. Any
other module is searched for its repeated blocks, which is all that most optimisations need. Those that need roles
refuse it, and say how to enrol it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from torch import nn

from penstock.config.plan import SWITCHES, AttentionBackend, Plan
from penstock.errors import ConfigError
from penstock.kernels.sdpa import Switch, set_sdpa, switch_of
from penstock.models.roles import Compound, Role, owned, placed, walk

R = TypeVar("R", bound=Role)
T = TypeVar("T")
Switches = Mapping[str, Callable[[Any, Any], None]]
_RECOMPILE_LIMIT = 64
WHOLE = "_penstock_anatomy"
"""Attribute of a model cut into pipeline stages: the anatomy of the whole model, with the parts of other processes."""
ELSEWHERE = "_penstock_elsewhere"
"""Attribute of a block that another process holds."""


@dataclass(frozen=True, slots=True)
class Block:
    """One of the repeated blocks, with its parts in the order in which they run."""

    name: str
    parts: tuple[Role, ...] = ()
    beside: bool = False
    """Whether it is an alternative to the block before it, at the same depth and for other samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Blocks that run one after the other, and what runs before and after them."""

    blocks: tuple[Block, ...]
    before: tuple[Role, ...] = ()
    after: tuple[Role, ...] = ()
    shares: tuple[str, ...] = ()
    """Embedding tables that run before its blocks too, but are listed as parts of an earlier stack."""


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """A model's parts by role. Every parameter of an enrolled family belongs to exactly one role."""

    family: str
    stacks: tuple[Stack, ...]
    """Stacks in the order in which they run."""
    reads: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """For each stack, the number of the stack whose output it reads (−1: a model input), and the numbers of the stacks
    that its cross attention reads. Empty: each stack has its own input, and its cross attention reads the stack
    before."""
    read_out: tuple[int, ...] = ()
    """Numbers of the stacks that heads read. Empty: the last."""
    beside: tuple[Role, ...] = ()
    """Parts that run before the stacks and whose result any block may read: every stage of a pipeline has them."""
    unknown: str = ""
    """Class path of a model that is not enrolled: only its blocks are known, not their parts."""

    def read_by(self, number: int) -> tuple[int, tuple[int, ...]]:
        """The stack whose output stack `number` reads (−1: an input), and the stacks that its cross attention reads."""
        return self.reads[number] if self.reads else (-1, (number - 1,) * (number > 0))

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks of all stacks, in the order in which they run."""
        return tuple(block.name for stack in self.stacks for block in stack.blocks)

    @property
    def depth(self) -> int:
        """Number of blocks that compute a sample."""
        return sum(not block.beside for stack in self.stacks for block in stack.blocks)

    def block_modules(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of `model` that this process holds, in the order in which they run."""
        every = (model.get_submodule(name) for name in self.blocks)
        return [block for block in every if not block.__dict__.get(ELSEWHERE)]

    def parts(self, kind: type[R]) -> Iterator[R]:
        """All parts of one role, such as `roles.Attention`. Raises ConfigError if the model's parts are not known."""
        if self.unknown:
            raise ConfigError(
                f"Penstock does not know which parts of {self.unknown} are of the role {kind.__name__}. "
                f"{_how_to_enrol(self.unknown)}"
            )
        return (role for role in walk((self.beside, self.stacks)) if isinstance(role, kind))

    def role_of(self, parameter: str) -> Role | None:
        """The role that a parameter belongs to. None if the model is not enrolled, or the part was added to it."""
        return closest_part(self._owners, parameter)

    def depth_of(self, parameter: str) -> int:
        """Number of the block that holds a parameter, counted from 1 along a sample's way through the model: 0 before
        the first block, and one more than the last block's for parts after it.
        """
        depth = closest_part(self._depths, parameter)
        return 0 if depth is None else depth

    @functools.cached_property
    def _owners(self) -> dict[str, Role]:
        return {name: role for role in walk((self.beside, self.stacks)) for name in owned(role)}

    @functools.cached_property
    def _depths(self) -> dict[str, int]:
        depths: dict[str, int] = {name: 0 for role in walk(self.beside) for name in owned(role)}
        so_far = 0
        for stack in self.stacks:
            depths |= {name: so_far for role in walk(stack.before) for name in owned(role)}
            for block in stack.blocks:
                so_far += not block.beside
                depths[block.name] = so_far
            after = so_far + 1 if stack is self.stacks[-1] else so_far
            depths |= {name: after for role in walk(stack.after) for name in owned(role)}
        return depths


def closest_part(table: Mapping[str, T], parameter: str) -> T | None:
    """The entry of the parameter itself or of the closest module around it."""
    while parameter not in table:
        parameter, dot, _ = parameter.rpartition(".")
        if not dot:
            return None
    return table[parameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models: how to find the anatomy of one, and how to apply fields of a Plan to it."""

    anatomy: Callable[[Any], Anatomy]
    switches: Switches | Callable[[Any], Switches] = field(default_factory=dict)
    """Functions of a model and a value, keyed by the Plan field that they apply; or a function that returns this
    mapping for a model. For fields in `SWITCHES` the value is the field's value. For `recompute` it is the name of a
    block: the backward pass recomputes its attention scores. For `cp` it is the `Cut` that says which tokens of each
    sample this rank has. For `tp` it is this rank's index and the number of ranks that split the heads, so that biases
    without weights are computed for its heads only.
    """


_FAMILIES: dict[str, Family] = {}


def enrol(class_path: str, family: Family) -> None:
    """Enrol a model class and its subclasses by the class path, for example `mypackage.models.MyViT`."""
    _FAMILIES[class_path] = family


def anatomy_of(model: nn.Module) -> Anatomy:
    """The declared anatomy of an enrolled model, or one found by looking for repeated blocks. For a pipeline stage it
    is the anatomy of the whole model.

    Raises ConfigError when there is neither; the message says how to enrol the model.
    """
    model = uncompiled(model)
    known: Anatomy | None = model.__dict__.get(WHOLE)
    if known is not None:
        return known
    family = _family_of(model)
    return _search(model) if family is None else family.anatomy(model)


def inner_model(model: nn.Module) -> nn.Module:
    """The enrolled model inside a wrapper such as a LightningModule: the outermost one with more than half of the
    wrapper's parameters. The module itself if there is none.
    """
    model = uncompiled(model)
    most = sum(p.numel() for p in model.parameters()) / 2
    enrolled = (module for module in model.modules() if _family_of(module) is not None)
    return next((m for m in enrolled if sum(p.numel() for p in m.parameters()) > most), model)


def switch_for(model: nn.Module, name: str) -> Callable[[Any], None] | None:
    """The function that sets a Plan field on a model (see `Family.switches`), or None if it has none.

    If a family has none for `attention` or `recompute`, and for any module that is not enrolled, calls of torch's
    `scaled_dot_product_attention` are switched. A module without such calls is not changed; `TrainStep` warns of this
    after its first step.
    """
    model = uncompiled(model)
    family = _family_of(model)
    switches: Any = {} if family is None else family.switches
    change = (switches(model) if callable(switches) else switches).get(name) or _ANY_MODEL.get(name)
    return None if change is None else functools.partial(change, model)


def set_switch(model: nn.Module, name: str, value: Any) -> None:
    """Set one of the Plan fields in `SWITCHES` on a model. Raises ConfigError if the model cannot apply the value."""
    change = switch_for(model, name)
    if change is not None:
        change(value)
    elif value != getattr(_DEFAULTS, name):
        raise ConfigError(
            f"{_path(type(uncompiled(model)))} {SWITCHES[name]}, so plan.{name}={value} cannot be applied to it; leave "
            f"plan.{name} out, or use a model of Penstock's own that can."
        )


def set_switches(model: nn.Module, plan: Plan, names: Set[str] | None = None) -> None:
    """Apply the fields of `SWITCHES` in `names`, or all that differ from the default. Raises as `set_switch`."""
    for name in SWITCHES:
        if (getattr(plan, name) != getattr(_DEFAULTS, name)) if names is None else name in names:
            set_switch(model, name, getattr(plan, name))


def _set_attention(model: nn.Module, backend: AttentionBackend) -> None:
    _call_sdpa(model)
    # Each block too: a block that is compiled by itself does not notice a switch on the model around it.
    try:
        blocks = anatomy_of(model).block_modules(model)
    except ConfigError:
        blocks = []
    switch = Switch(backend)
    for module in (model, *blocks):
        set_sdpa(module, switch)


def _call_sdpa(model: Any) -> None:
    """Make a model of transformers that was created with `attn_implementation="eager"` call torch's attention."""
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != "eager":
        return
    try:
        model.set_attn_implementation("sdpa")
    except (AttributeError, ValueError) as error:
        raise ConfigError(
            f"plan.attention cannot be applied to {_path(type(model))}, which computes attention by itself: {error}"
        ) from error


def _recompute_scores(model: nn.Module, block: str) -> None:
    there = switch_of(model)
    switch = Switch("sdpa" if there is None else there.backend, again=True, around=there)
    set_sdpa(model.get_submodule(block), switch)


_ANY_MODEL: Switches = {"attention": _set_attention, "recompute": _recompute_scores}
_DEFAULTS = Plan()


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, for callers without an Anatomy: one of torch's norms, or a module whose class name
    contains "norm", whose own parameters are vectors and which has no submodules.
    """
    if isinstance(module, _NORMS):
        return True
    if "norm" not in type(module).__name__.lower() or next(module.children(), None) is not None:
        return False
    return all(parameter.ndim <= 1 for parameter in module.parameters(recurse=False))


_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


def let_recompile() -> None:
    """Raise torch's limits on recompilation. All models of a class share them; past a limit torch only warns and runs
    eagerly, so that eager code would be measured as compiled code.
    """
    from torch.compiler import config  # late: reading it takes a second

    config.recompile_limit = max(config.recompile_limit, _RECOMPILE_LIMIT)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 16 * _RECOMPILE_LIMIT)


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that torch.compile wrapped, or the module itself."""
    return dict(model.named_children()).get("_orig_mod", model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, a model is in evaluation mode; afterwards the mode of each module is restored."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _path(cls: type) -> str:
    """The class path that `enrol` takes."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _how_to_enrol(path: str) -> str:
    """The part of an error message that says how to enrol a model class."""
    return (
        f"Enrol it: penstock.models.anatomy.enrol({path!r}, Family(anatomy=lambda model: Anatomy(family='mine', "
        f"stacks=(Stack(blocks=(Block('layers.0', (roles.Norm('layers.0.norm'), …)), …)),))))."
    )


def _family_of(model: nn.Module) -> Family | None:
    paths = (_path(cls) for cls in type(model).__mro__)
    return next((_FAMILIES[path] for path in paths if path in _FAMILIES), None)


def _search(model: nn.Module) -> Anatomy:
    """Guess the blocks: the container of modules of one class and shape that holds the most parameters."""
    best, most = "", 0
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and _alike(module):
            held = sum(p.numel() for p in module.parameters())
            if held > most:
                best, most = name, held
    path = _path(type(model))
    if not most:
        raise ConfigError(
            f"No repeated blocks were found in {path}: it has no ModuleList or Sequential of two or more modules of "
            f"one class and shape. {_how_to_enrol(path)}"
        )
    prefix = f"{best}." if best else ""
    blocks = tuple(Block(prefix + child) for child, _ in model.get_submodule(best).named_children())
    after = tuple(Role(name) for name in _trailing(model, prefix))
    return Anatomy(family="unknown", stacks=(Stack(blocks=blocks, after=after),), unknown=path)


def _alike(container: nn.Module) -> bool:
    children = list(container.children())
    if len(children) < 2 or len({type(child) for child in children}) != 1:
        return False
    shapes = {tuple(tuple(p.shape) for p in child.parameters()) for child in children}
    return len(shapes) == 1 and shapes != {()}


def _trailing(model: nn.Module, blocks: str) -> Iterator[str]:
    """Modules with parameters of their own that are declared after the blocks; they are assumed to run after them."""
    seen = False
    for name, module in model.named_modules():
        if blocks and name.startswith(blocks):
            seen = True
        elif seen and not list(module.children()) and list(module.parameters(recurse=False)):
            yield name


def numbered(names: Iterable[str], pattern: str) -> tuple[str, ...]:
    """The distinct prefixes of `names` that match `pattern`, sorted by the number in its group."""
    beginnings = {(int(m.group(1)), m.group(0)) for name in names if (m := re.match(pattern, name))}
    return tuple(name for _, name in sorted(beginnings))


def stack(
    blocks: Iterable[str], parts: tuple[Role, ...], *, before: tuple[Role, ...] = (),
    after: tuple[Role, ...] = (),
) -> Stack:  # fmt: skip
    """A stack whose blocks have the same parts, named relative to each block."""
    return Stack(
        before=before, blocks=tuple(Block(block, placed(parts, f"{block}.")) for block in blocks), after=after
    )


def pruned(part: T, names: Iterable[str]) -> T:
    """A tree of roles with only the parts that are in `names`, the model's parameters and modules: a family declares
    all parts that any of its models may have. A part without one of its required fields is removed as a whole.
    """
    there = set(names)
    there |= {name[:dot] for name in there for dot in range(len(name)) if name[dot] == "."}
    return cast(T, _pruned(part, there))


def _pruned(part: Any, there: set[str]) -> Any:
    if isinstance(part, tuple):
        return tuple(kept for each in part if (kept := _pruned(each, there)) is not None)
    if not is_dataclass(part):
        return part
    if isinstance(part, Role) and not isinstance(part, Compound):
        return part if part.name in there else None
    changes: dict[str, Any] = {}
    for each in fields(part):
        value = getattr(part, each.name)
        kept = changes[each.name] = _pruned(value, there)
        needed = isinstance(part, Compound) and each.default is MISSING
        if needed and (kept is None or (isinstance(kept, tuple) and len(kept) < len(value))):
            return None
    return replace(part, **changes)  # type: ignore[type-var]
