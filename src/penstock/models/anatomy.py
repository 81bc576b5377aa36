"""What the parts of a model are, as data: every optimisation reads this one table instead of patching models.

A family is enrolled with `enrol`, by the class path of its module, so that foreign libraries are never
imported. A module that nobody enrolled is searched for its repeated blocks, which is all that most
optimisations need.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import nn

from penstock.config.plan import AttentionBackend, Layout
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """Qualified names of a model's parts. Names under "within a block" are relative to each block.

    Together `stem`, `embeddings`, `blocks`, `final_norms` and `head` hold every parameter of an enrolled
    family.
    """

    family: str
    blocks: tuple[str, ...]
    """The repeated blocks, in the order in which they run."""
    stem: tuple[str, ...] = ()
    """Modules that turn the input into tokens."""
    embeddings: tuple[str, ...] = ()
    """Parameters that are added to or put among the tokens: positions, class tokens."""
    final_norms: tuple[str, ...] = ()
    """Norms after the blocks."""
    head: tuple[str, ...] = ()
    """Modules that turn features into the output."""
    norms: tuple[str, ...] = ()
    """Within a block: its norms."""
    attention: tuple[str, ...] = ()
    """Within a block: its attention modules."""
    mlp: tuple[str, ...] = ()
    """Within a block: its perceptrons; may be the block itself where they have no module of their own."""
    column_parallel: tuple[str, ...] = ()
    """Within a block: linears whose output features can be split over devices. A fused qkv is among them."""
    row_parallel: tuple[str, ...] = ()
    """Within a block: linears whose input features are then split alike, and whose output is summed."""
    qkv_by_head: bool = False
    """Whether a slice of the fused qkv's rows is a whole number of heads; if not, split q, k and v each."""
    dropouts: tuple[str, ...] = ()
    """Within a block: modules that draw random numbers while training."""

    def depth_of(self, parameter: str) -> int:
        """How deep a parameter lies: 0 before the blocks, i + 1 in block i, and `len(blocks) + 1` after
        them.
        """
        for index, block in enumerate(self.blocks):
            if parameter.startswith(f"{block}."):
                return index + 1
        after = any(
            parameter == name or parameter.startswith(f"{name}.") for name in self.final_norms + self.head
        )
        return len(self.blocks) + 1 if after else 0

    def block_modules(self, model: nn.Module) -> list[nn.Module]:
        """The repeated blocks of `model`, in order."""
        return [model.get_submodule(name) for name in self.blocks]

    def within(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Qualified names, in every block, of parts named relative to a block."""
        return tuple(f"{block}.{name}" if name else block for block in self.blocks for name in names)

    def prefixed(self, prefix: str) -> Anatomy:
        """The anatomy of a model that holds this one under `prefix`, itself ending in a dot or empty."""

        def add(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(prefix + name for name in names)

        return replace(
            self,
            blocks=add(self.blocks),
            stem=add(self.stem),
            embeddings=add(self.embeddings),
            final_norms=add(self.final_norms),
            head=add(self.head),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family of models is taken: its anatomy, and how it switches attention and layout, if it can."""

    anatomy: Callable[[nn.Module], Anatomy]
    set_attention: Callable[[nn.Module, AttentionBackend], None] | None = None
    set_layout: Callable[[nn.Module, Layout], None] | None = None


_FAMILIES: dict[str, Family] = {}


def enrol(class_path: str, family: Family) -> None:
    """Make a model class known by its path, for example `mypackage.models.MyViT`; its subclasses are known
    with it.
    """
    _FAMILIES[class_path] = family


def anatomy_of(model: nn.Module) -> Anatomy:
    """The declared anatomy of an enrolled model, or one found by looking for repeated blocks.

    Raises ConfigError when there is neither; the message says how to enrol the model.
    """
    model = _unwrap(model)
    family = _family_of(model)
    return _search(model) if family is None else family.anatomy(model)


def set_layout(model: nn.Module, layout: Layout) -> None:
    """Choose the order of the token tensor inside the blocks. Raises ConfigError where the family has one
    only.
    """
    model = _unwrap(model)
    family = _family_of(model)
    if family is not None and family.set_layout is not None:
        family.set_layout(model, layout)
    elif layout != "batch_first":
        raise ConfigError(
            f"{_path(type(model))} knows no layout but batch_first, so plan.layout {layout!r} cannot be "
            f"applied to it; leave plan.layout at batch_first, or use Penstock's own model of this family."
        )


def set_attention(model: nn.Module, backend: AttentionBackend) -> None:
    """Choose the attention kernel in every block. Raises ConfigError where the family cannot take it."""
    model = _unwrap(model)
    family = _family_of(model)
    if family is not None and family.set_attention is not None:
        family.set_attention(model, backend)
    elif backend != "sdpa":
        raise ConfigError(
            f"Penstock does not know how {_path(type(model))} computes attention, so plan.attention "
            f"{backend!r} cannot be applied to it; leave plan.attention at sdpa, which changes nothing, or "
            f"enrol the model: penstock.models.anatomy.enrol({_path(type(model))!r}, Family(anatomy=…, "
            f"set_attention=…))."
        )


def _unwrap(model: nn.Module) -> nn.Module:
    """The module inside what torch.compile returns."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _family_of(model: nn.Module) -> Family | None:
    from penstock.models import families  # enrols the families that ship with Penstock

    families.load()
    return next((_FAMILIES[path] for cls in type(model).__mro__ if (path := _path(cls)) in _FAMILIES), None)


def _search(model: nn.Module) -> Anatomy:
    """Take the container of alike modules that holds the most parameters for the blocks."""
    best, most = "", 0
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and _alike(module):
            held = sum(p.numel() for p in module.parameters())
            if held > most:
                best, most = name, held
    if not most:
        path = _path(type(model))
        raise ConfigError(
            f"No repeated blocks were found in {path}: it has no ModuleList or Sequential of two or more "
            f"modules of one class and shape. Enrol it: penstock.models.anatomy.enrol({path!r}, "
            f"Family(anatomy=lambda model: Anatomy(family='mine', blocks=('layers.0', …))))."
        )
    container = model.get_submodule(best)
    prefix = f"{best}." if best else ""
    return Anatomy(
        family="unknown",
        blocks=tuple(prefix + child for child, _ in container.named_children()),
        head=tuple(_trailing_linears(model, prefix)),
    )


def _alike(container: nn.Module) -> bool:
    children = list(container.children())
    if len(children) < 2 or len({type(child) for child in children}) != 1:
        return False
    shapes = {tuple(tuple(p.shape) for p in child.parameters()) for child in children}
    return len(shapes) == 1 and shapes != {()}


def _trailing_linears(model: nn.Module, blocks: str) -> Iterator[str]:
    """Modules declared after the blocks that hold parameters: taken for what comes after them."""
    seen = False
    for name, module in model.named_modules():
        if blocks and name.startswith(blocks):
            seen = True
        elif seen and not list(module.children()) and list(module.parameters(recurse=False)):
            yield name


def numbered(model: nn.Module, pattern: str) -> tuple[str, ...]:
    """Names of modules that match `pattern` (a regular expression with one group, the number), in that
    order.
    """
    found = [
        (int(m.group(1)), name) for name, _ in model.named_modules() if (m := re.fullmatch(pattern, name))
    ]
    return tuple(name for _, name in sorted(found))
