"""The parts of a model, as data: stacks of blocks whose parts have roles.

A family is enrolled with `enrol`, by the class path of its module, so that foreign libraries are never imported. Any
other module is searched for its repeated blocks, which is all that most optimisations need. Those that need roles
refuse it, and say how to enrol it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from torch import nn

from penstock.config.plan import AttentionBackend, LossForm, Padding, TokenOrder
from penstock.errors import ConfigError
from penstock.kernels.sdpa import Switch, set_sdpa, switch_of
from penstock.kernels.token_cut import Cut
from penstock.models.roles import Compound, Role, owned, placed, walk

R = TypeVar("R", bound=Role)
T = TypeVar("T")
_RECOMPILE_LIMIT = 64
WHOLE = "_penstock_anatomy"
"""Attribute of a model that was cut into stages: its anatomy from before, which names what other processes hold too."""
ELSEWHERE = "_penstock_elsewhere"
"""Attribute of a block that another process holds."""


@dataclass(frozen=True, slots=True)
class Block:
    """One of the repeated blocks, with its parts in the order in which they run."""

    name: str
    parts: tuple[Role, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Blocks that run one after the other, and what runs before and after them."""

    blocks: tuple[Block, ...]
    before: tuple[Role, ...] = ()
    after: tuple[Role, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """A model's parts by role. Every parameter of an enrolled family belongs to exactly one role."""

    family: str
    stacks: tuple[Stack, ...]
    """Stacks in the order in which they run: one, or an encoder and a decoder."""
    unknown: str = ""
    """Class path of a model that is not enrolled: its blocks are known, and their parts are not."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks of all stacks, in the order in which they run."""
        return tuple(block.name for stack in self.stacks for block in stack.blocks)

    def block_modules(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of `model` that this process holds, in the order in which they run."""
        every = (model.get_submodule(name) for name in self.blocks)
        return [block for block in every if not block.__dict__.get(ELSEWHERE)]

    def parts(self, kind: type[R]) -> Iterator[R]:
        """All parts of one role, such as `roles.Attention`. Raises ConfigError where no parts are known."""
        if self.unknown:
            raise ConfigError(
                f"Penstock does not know which parts of {self.unknown} are of the role {kind.__name__}. "
                f"{_how_to_enrol(self.unknown)}"
            )
        return (role for role in walk(self.stacks) if isinstance(role, kind))

    def role_of(self, parameter: str) -> Role | None:
        """The role that a parameter belongs to. None if the model is not enrolled, or the part was added to it."""
        return _nearest(self._owners, parameter)

    def depth_of(self, parameter: str) -> int:
        """How many blocks run up to the one that holds a parameter: 0 before the first block, i + 1 in block i, and
        one more than all blocks for what follows the last.
        """
        found = _nearest(self._depths, parameter)
        return 0 if found is None else found

    @functools.cached_property
    def _owners(self) -> dict[str, Role]:
        return {name: role for role in walk(self.stacks) for name in owned(role)}

    @functools.cached_property
    def _depths(self) -> dict[str, int]:
        depths: dict[str, int] = {}
        so_far = 0
        for stack in self.stacks:
            depths |= {name: so_far for role in walk(stack.before) for name in owned(role)}
            for block in stack.blocks:
                so_far += 1
                depths[block.name] = so_far
            after = so_far + 1 if stack is self.stacks[-1] else so_far
            depths |= {name: after for role in walk(stack.after) for name in owned(role)}
        return depths


def _nearest(table: dict[str, T], parameter: str) -> T | None:
    """The entry of the parameter itself or of the closest module around it."""
    while parameter not in table:
        parameter, dot, _ = parameter.rpartition(".")
        if not dot:
            return None
    return table[parameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family of models is treated: its anatomy, and how it switches attention, token order, the form of its
    loss and padding, if it can."""

    anatomy: Callable[[Any], Anatomy]
    set_attention: Callable[[Any, AttentionBackend], None] | None = None
    set_token_order: Callable[[Any, TokenOrder], None] | None = None
    set_loss: Callable[[Any, LossForm], None] | None = None
    set_padding: Callable[[Any, Padding], None] | None = None
    recompute_scores: Callable[[Any], None] | None = None
    """Let a block recompute attention's scores in its backward pass."""
    share_tokens: Callable[[Any, Cut], None] | None = None
    """Compute this rank's tokens of samples that are cut over several."""
    set_heads: Callable[[Any, int, int], None] | None = None
    """Called where ranks split the heads, with this rank's place and how many ranks there are: for what a model
    makes for all heads without weights."""


_FAMILIES: dict[str, Family] = {}


def enrol(class_path: str, family: Family) -> None:
    """Make a model class known by its path, for example `mypackage.models.MyViT`, and its subclasses with it."""
    _FAMILIES[class_path] = family


def anatomy_of(model: nn.Module) -> Anatomy:
    """The declared anatomy of an enrolled model, or one found by looking for repeated blocks. Of a model that was cut
    into stages it is that of the whole model.

    Raises ConfigError when there is neither; the message says how to enrol the model.
    """
    model = uncompiled(model)
    known: Anatomy | None = model.__dict__.get(WHOLE)
    if known is not None:
        return known
    family = _family_of(model)
    return _search(model) if family is None else family.anatomy(model)


def set_token_order(model: nn.Module, token_order: TokenOrder) -> None:
    """Choose the order of the token tensor inside the blocks. Raises ConfigError where the family has one only."""
    model = uncompiled(model)
    family = _family_of(model)
    if family is not None and family.set_token_order is not None:
        family.set_token_order(model, token_order)
    elif token_order != "batch_first":
        why = "has no token order but batch_first"
        raise _without_choice(model, "token_order", token_order, why, "model of this family")


def set_attention(model: nn.Module, backend: AttentionBackend) -> None:
    """Choose the attention kernel in every block. Raises ConfigError where the family cannot take it.

    Of a family that does not say how, and of any other module, calls of torch's `scaled_dot_product_attention` are
    switched. A module that makes none is not changed by it, which `TrainStep` says after its first step.
    """
    model = uncompiled(model)
    family = _family_of(model)
    if family is not None and family.set_attention is not None:
        family.set_attention(model, backend)
        return
    # Each block too: compiled by itself, it does not see what stands around it.
    try:
        blocks = anatomy_of(model).block_modules(model)
    except ConfigError:
        blocks = []
    switch = Switch(backend)
    for module in (model, *blocks):
        set_sdpa(module, switch)


def recompute_scores(model: nn.Module, block: str) -> None:
    """Let a block's backward pass compute attention's scores again, where they would be kept for it. Of a family that
    does not say how, and of any other module, calls of torch's `scaled_dot_product_attention` are made so.
    """
    model = uncompiled(model)
    family, module = _family_of(model), model.get_submodule(block)
    if family is not None and family.recompute_scores is not None:
        family.recompute_scores(module)
        return
    there = switch_of(model)
    set_sdpa(module, Switch("sdpa" if there is None else there.backend, again=True, around=there))


def share_tokens(model: nn.Module, cut: Cut) -> bool:
    """Let a model compute this rank's tokens of every sample; false where its family does not know how."""
    family = _family_of(uncompiled(model))
    if family is None or family.share_tokens is None:
        return False
    family.share_tokens(uncompiled(model), cut)
    return True


def set_heads(model: nn.Module, index: int, count: int) -> None:
    """Tell a model that share `index` of `count` of its heads is computed here."""
    family = _family_of(uncompiled(model))
    if family is not None and family.set_heads is not None:
        family.set_heads(uncompiled(model), index, count)


def set_loss(model: nn.Module, form: LossForm) -> None:
    """Choose how a model makes the loss over its vocabulary. Raises ConfigError where it makes none itself."""
    model = uncompiled(model)
    family = _family_of(model)
    if family is None or family.set_loss is None:
        raise _without_choice(
            model, "loss", form, "does not make its loss itself", "decoder, encoder or encoder–decoder"
        )
    family.set_loss(model, form)


def set_padding(model: nn.Module, padding: Padding) -> None:
    """Choose whether a model computes padding. Raises ConfigError where it cannot leave it out."""
    model = uncompiled(model)
    family = _family_of(model)
    if family is None or family.set_padding is None:
        raise _without_choice(
            model, "padding", padding, "computes all tokens that it is given", "encoder or encoder–decoder"
        )
    family.set_padding(model, padding)


def _without_choice(model: nn.Module, field: str, value: str, why: str, ours: str) -> ConfigError:
    """A setting of a Plan that no model of this class has a use for."""
    return ConfigError(
        f"{_path(type(model))} {why}, so plan.{field}={value} cannot be applied to it; leave plan.{field} out, or use "
        f"Penstock's own {ours}."
    )


def is_norm(module: nn.Module) -> bool:
    """Whether a module of any model normalises, for who cannot ask its Anatomy: torch's own norms, and modules of other
    libraries that are called so, hold vectors and no modules.
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
    """Have torch keep compiled code of many models and shapes. All models of a class share a limit, past which torch
    runs eagerly with no more than a warning: eager code would go under the name of compiled.
    """
    from torch.compiler import config  # late: reading it takes a second

    config.recompile_limit = max(config.recompile_limit, _RECOMPILE_LIMIT)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 16 * _RECOMPILE_LIMIT)


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside what torch.compile returns."""
    return dict(model.named_children()).get("_orig_mod", model)


def _path(cls: type) -> str:
    """The class path that `enrol` takes."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _how_to_enrol(path: str, more: str = "") -> str:
    """The words that make a model's parts known."""
    also = f", {more}" if more else ""
    return (
        f"Enrol it: penstock.models.anatomy.enrol({path!r}, Family(anatomy=lambda model: Anatomy(family='mine', "
        f"stacks=(Stack(blocks=(Block('layers.0', (roles.Norm('layers.0.norm'), …)), …)),)){also}))."
    )


def _family_of(model: nn.Module) -> Family | None:
    paths = (_path(cls) for cls in type(model).__mro__)
    return next((_FAMILIES[path] for path in paths if path in _FAMILIES), None)


def _search(model: nn.Module) -> Anatomy:
    """Take the container of modules of one class and shape that holds the most parameters for the blocks."""
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
    """Modules with parameters of their own that are declared after the blocks: taken for what runs after them."""
    seen = False
    for name, module in model.named_modules():
        if blocks and name.startswith(blocks):
            seen = True
        elif seen and not list(module.children()) and list(module.parameters(recurse=False)):
            yield name


def numbered(names: Iterable[str], pattern: str) -> tuple[str, ...]:
    """The distinct beginnings of `names` that match `pattern`, a regular expression with one group, the number, by
    number.
    """
    found = {(int(m.group(1)), m.group(0)) for name in names if (m := re.match(pattern, name))}
    return tuple(name for _, name in sorted(found))


def stack(
    blocks: Iterable[str],
    parts: tuple[Role, ...],
    *,
    before: tuple[Role, ...] = (),
    after: tuple[Role, ...] = (),
) -> Stack:
    """A stack whose blocks have the same parts, named relative to each block."""
    return Stack(
        before=before,
        blocks=tuple(Block(block, placed(parts, f"{block}.")) for block in blocks),
        after=after,
    )


def pruned(part: T, names: Iterable[str]) -> T:
    """A tree of roles without what is not among the `names` of parameters and modules: a family declares all that its
    models may have. A part that lacks something it cannot be without goes as a whole.
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
    for field in fields(part):
        value = getattr(part, field.name)
        kept = changes[field.name] = _pruned(value, there)
        needed = isinstance(part, Compound) and field.default is MISSING
        if needed and (kept is None or (isinstance(kept, tuple) and len(kept) < len(value))):
            return None
    return replace(part, **changes)  # type: ignore[type-var]
