"""`OpLists`: the type in which each operation runs, as data that users can extend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import get_overridable_functions, resolve_name

from penstock.config.convert import nearest
from penstock.config.formats import HalfDtype
from penstock.containers import replaced, tensors
from penstock.dtypes import HALVES
from penstock.errors import ConfigError
from penstock.precision.lists.table import AUTOCAST, BANNED, CPU_PROMOTED, CPU_WHOLE, GROUPS, POLICIES, Policy

Function = Callable[..., Any]

OWN_FUNCTION = (
    "f(x.float()) inside `with torch.autocast(x.device.type, enabled=False)` for fp32, and "
    "f(x.to(torch.get_autocast_dtype(x.device.type))) for the half type"
)
"""How a function that is no operation of torch follows a list, in messages."""
# Namespaces in which the same last name means the same operation. torch.linalg and torch.fft have names of their own.
_ALIKE = ("torch.nn.functional", "torch", "torch.Tensor", "torch.special")
# Classes in torch.ops: operations, and their overloads by the types of arguments.
_PACKET, _OVERLOAD = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)
_OPERATORS = {
    "add": ("__add__", "__radd__"),
    "sub": ("__sub__", "__rsub__"),
    "mul": ("__mul__", "__rmul__"),
    "div": ("__div__", "__rdiv__", "__truediv__", "__rtruediv__"),
    "matmul": ("__matmul__", "__rmatmul__"),
    "pow": ("__pow__", "__rpow__"),
}


def functions_of(name: str) -> frozenset[Function]:
    """Every function that calls the operation of this dotted name, for example "torch.softmax".

    Raises ConfigError when torch has no such operation, or does not let a TorchFunctionMode intercept it.
    """
    functions = frozenset(function for full in _aliases(name) if (function := _lookup(full)) is not None)
    if not functions:
        raise ConfigError(_unknown(name))
    return functions


def name_of(function: Function | str) -> str:
    """The name of an operation in the lists, from any of its functions or names.

    Raises ConfigError if it is not an operation of torch; the message says how such a function is listed.
    """
    if isinstance(function, str):
        functions_of(function)
        return _canonical(function)
    if isinstance(function, _PACKET):
        return f"torch.ops.{str(function).replace('::', '.')}"
    name = resolve_name(function) if function in _watchable() else None
    if not name:
        what = getattr(function, "__qualname__", repr(function))
        raise ConfigError(
            f"{what} is no operation of torch, so torch cannot tell when it is called. It can cast by itself: "
            f"{OWN_FUNCTION}."
        )
    return _canonical(name)


@functools.cache
def _watchable() -> frozenset[Function]:
    """Every function that a TorchFunctionMode can intercept."""
    return frozenset(function for group in get_overridable_functions().values() for function in group)


@functools.cache
def _canonical(name: str) -> str:
    """The name in the first of the alike namespaces: torch.softmax becomes torch.nn.functional.softmax."""
    return next((full for full in _aliases(name) if _lookup(full) is not None), name)


def _aliases(name: str) -> tuple[str, ...]:
    place, _, last = name.rpartition(".")
    if place == "torch.functional":  # where torch itself keeps some of what it shows as torch.einsum
        place = "torch"
    if place not in _ALIKE:
        return (name,)
    for operation, operators in _OPERATORS.items():
        if last in operators:
            last = operation
    operators = tuple(f"torch.Tensor.{operator}" for operator in _OPERATORS.get(last, ()))
    return tuple(f"{place}.{last}" for place in _ALIKE) + operators


@functools.cache
def _lookup(name: str) -> Function | None:
    """The function of a dotted name, if a TorchFunctionMode can intercept it."""
    first, *rest = name.split(".")
    if first != "torch":
        return None
    resolved: Any = torch
    for part in rest:
        try:
            resolved = getattr(resolved, part)
        except (AttributeError, RuntimeError):  # torch.ops raises RuntimeError of its own for some names
            return None
    if isinstance(resolved, _PACKET | _OVERLOAD):
        return resolved
    return resolved if callable(resolved) and resolved in _watchable() else None


def _unknown(name: str) -> str:
    last = name.rpartition(".")[2]
    names = {full for function in _watchable() if (full := resolve_name(function))}
    close = sorted(full for full in names if full.rpartition(".")[2] == last)
    hint = f" Did you mean {' or '.join(close[:3])}?" if close else nearest(name, sorted(names))
    if not name.startswith("torch."):
        return (
            f"{name!r} is no operation of torch, and lists of operations name only those.{hint} A function of another "
            f"kind can cast by itself: {OWN_FUNCTION}."
        )
    return f"torch has no operation {name!r} that a list can name.{hint}"


CASTABLE = (torch.float16, torch.bfloat16, torch.float32)
_VARIANTS = {
    "lerp": ("Scalar", "Tensor"), "lerp_": ("Scalar", "Tensor"), "scatter": ("src",), "scatter_": ("src",),
    "scatter_reduce_": ("two",),
}  # fmt: skip
"""Overloads of operations that have more than the default."""
_WRITES = (
    "index_put_", "index_add_", "index_copy_", "masked_scatter_", "scatter_", "scatter_add_", "scatter_reduce_",
    "lerp_",
)  # fmt: skip
"""Operations in place that refuse values of another type than the tensor has, as x[rows] = values does."""
_library: list[torch.library.Library] = []


@functools.cache
def registered() -> dict[str, Policy]:
    """The operations that need no interception on a CPU, since `register` handles them, each with its list."""
    policies: dict[str, Policy] = dict.fromkeys(map(name_of, CPU_PROMOTED), "promote")
    return policies | dict.fromkeys(map(name_of, CPU_WHOLE), "half")


def register() -> None:
    """Let torch.autocast accept mixed arguments of these operations, from now on and in the whole process: of
    `registered` on a CPU, and of those in place everywhere.

    Working calls do not change: `promote` and writing in place act only if types differ, which torch refuses, and
    `half` does the same as the matrix products from which torch composes the operation. It is off when autocast is off.
    """
    if _library:
        return
    _library.append(torch.library.Library("aten", "IMPL"))  # type: ignore[no-untyped-call]
    policies = {
        name.removeprefix("torch.nn.functional.").removeprefix("torch.").replace("linalg.", "linalg_"): policy
        for name, policy in registered().items()
    }
    for packet, policy in (*policies.items(), *((name, None) for name in _WRITES)):
        for variant in _VARIANTS.get(packet, ("default",)):
            overload = getattr(getattr(torch.ops.aten, packet), variant)
            for place in ("cpu", "cuda") if policy is None else ("cpu",):
                kernel = _casting(overload, policy, place)
                _library[0].impl(overload, kernel, f"Autocast{place.upper()}")  # type: ignore[no-untyped-call]


def _casting(overload: Callable[..., Any], policy: Policy | None, place: str) -> Callable[..., Any]:
    """An operation that casts its arguments by its list, `promote` or `half`, or to the type of the tensor that it
    writes to (None)."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        operands = list(tensors((args, kwargs)))
        dtype = torch.float32
        if policy == "half":
            dtype = torch.get_autocast_dtype(place)
            # A single number beside a tensor scales it, and is no matrix product.
            casts = all(tensor.dtype in CASTABLE and tensor.ndim > 0 for tensor in operands)
        else:
            casts = len({tensor.dtype for tensor in operands if tensor.dtype in CASTABLE}) > 1
            if policy is None:
                dtype, casts = operands[0].dtype, casts and operands[0].dtype in CASTABLE
        if casts:
            args, kwargs = replaced((args, kwargs), lambda t: t.to(dtype) if t.dtype in CASTABLE else t)
        with torch.autocast(place, enabled=False):
            return overload(*args, **kwargs)

    return kernel


ModuleChoice = str | type[nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpLists:
    """Operations by dotted name, such as "torch.nn.functional.gelu"; one name stands for all functions of an operation.

    Operations in no list run as torch.autocast decides. `default_lists` gives those of a type and `with_` adds to them.
    """

    half: tuple[str, ...] = ()
    """Arguments are cast to the half type."""
    fp32: tuple[str, ...] = ()
    """Arguments are cast to fp32, and so is the result."""
    promote: tuple[str, ...] = ()
    """Arguments of several types are cast to the widest of them."""
    keep: tuple[str, ...] = ()
    """Runs in the type of its first tensor, even where torch.autocast would widen it."""
    banned: tuple[tuple[str, str], ...] = ()
    """Operations that raise ConfigError for half-width tensors, each with the message, which says what to use
    instead."""
    fp32_modules: tuple[ModuleChoice, ...] = ()
    """Modules whose forward runs in fp32, all in them included: qualified names, patterns
    ("encoder.blocks.*.mlp"), classes."""
    half_modules: tuple[ModuleChoice, ...] = ()
    """Modules whose inputs are cast to the half type; inside them the lists decide."""
    modes: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The modes that `region` has made from these lists so far."""

    def __post_init__(self) -> None:
        seen: dict[str, Policy] = {}
        problems = []
        for policy in POLICIES:
            names = self.named(policy)
            object.__setattr__(self, policy, _in_list(policy, getattr(self, policy)))
            for name in names:
                other = seen.setdefault(name_of(name), policy)
                if other != policy:
                    problems.append(
                        f"{name} is in the lists {other} and {policy}; an operation has one place."
                    )
        problems += [
            f"{choice} is in fp32_modules and half_modules; a module has one place."
            for choice in set(self.fp32_modules) & set(self.half_modules)
        ]
        if problems:
            raise ConfigError(problems)

    def named(self, policy: Policy) -> tuple[str, ...]:
        """The operations of one list."""
        return tuple(name for name, _ in self.banned) if policy == "banned" else tuple(getattr(self, policy))

    def policies(self) -> dict[str, Policy]:
        """The list that each operation is in."""
        return {name: policy for policy in POLICIES for name in self.named(policy)}

    def with_(
        self, *, half: Iterable[str | Function] = (), fp32: Iterable[str | Function] = (),
        promote: Iterable[str | Function] = (), keep: Iterable[str | Function] = (),
        banned: Mapping[str | Function, str] | None = None, fp32_modules: Iterable[ModuleChoice] = (),
        half_modules: Iterable[ModuleChoice] = (),
    ) -> OpLists:  # fmt: skip
        """These lists with additions. Operations are given by name or as functions, and leave their earlier list.

        Raises:
            ConfigError: a name is no operation of torch, or is given for two lists.
        """
        added: dict[str, tuple[Any, ...]] = {
            "half": tuple(map(name_of, half)),
            "fp32": tuple(map(name_of, fp32)),
            "promote": tuple(map(name_of, promote)),
            "keep": tuple(map(name_of, keep)),
        }
        messages = {name_of(name): message for name, message in (banned or {}).items()}
        kept = self.without(*messages, *(name for names in added.values() for name in names))
        return replace(
            kept,
            **{policy: getattr(kept, policy) + names for policy, names in added.items()},
            banned=kept.banned + tuple(messages.items()),
            fp32_modules=kept.fp32_modules + tuple(fp32_modules),
            half_modules=kept.half_modules + tuple(half_modules),
        )

    def without(self, *names: str | Function) -> OpLists:
        """These lists without some operations, which then run as torch.autocast decides."""
        dropped = {name_of(name) for name in names}
        kept: dict[str, Any] = {
            policy: tuple(name for name in self.named(policy) if name not in dropped) for policy in POLICIES
        }
        kept["banned"] = tuple((name, message) for name, message in self.banned if name not in dropped)
        return replace(self, **kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> OpLists:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(
            OpLists, **{f.name: getattr(self, f.name) for f in fields(self) if f.init}
        ), ()


def _in_list(policy: Policy, entries: Iterable[Any]) -> tuple[Any, ...]:
    if policy == "banned":
        return tuple({name_of(name): message for name, message in entries}.items())
    return tuple(dict.fromkeys(map(name_of, entries)))


def default_lists(dtype: torch.dtype, device_type: str = "cuda") -> OpLists:
    """Penstock's lists for fp16 or bf16, each entry with its reason in docs/reference/op-lists.md.

    For bf16, and for fp16 on CUDA, no call differs from torch.autocast's own choice except torch's norm and softmax
    modules, so that these lists cost nothing. Raises ConfigError for other types.
    """
    if dtype not in HALVES:
        raise ConfigError(f"There are op lists for torch.float16 and torch.bfloat16, and none for {dtype}.")
    return _default_lists(HALVES[dtype], "cpu" if device_type == "cpu" else "cuda")


@functools.cache
def _default_lists(half: HalfDtype, place: str) -> OpLists:
    chosen: dict[Policy, list[str]] = {policy: [] for policy in POLICIES}
    for group in GROUPS:
        if half in group.dtypes and place in group.devices:
            chosen[group.policy] += group.names
    banned = tuple((name, BANNED[name]) for name in chosen.pop("banned"))
    return OpLists(banned=banned, **{policy: tuple(names) for policy, names in chosen.items()})


def autocast_policy(name: str | Function, device_type: str) -> Policy | None:
    """The list that matches torch.autocast's own treatment of an operation on a device, or None."""
    return _autocast_policies(device_type).get(name_of(name))


@functools.cache
def _autocast_policies(device_type: str) -> dict[str, Policy]:
    table = AUTOCAST.get(device_type, {})
    return {name_of(member): policy for policy, members in table.items() for member in members}


def differences(lists: OpLists, device_type: str) -> dict[str, Policy]:
    """Operations that these lists treat differently from torch.autocast on a device, each with its list.

    `keep` is a difference only where torch.autocast would widen the operation.
    """
    policies = {}
    for name, policy in lists.policies().items():
        autocast = autocast_policy(name, device_type)
        if policy == "keep" and autocast != "fp32":
            continue
        if policy != autocast or (policy == "banned" and dict(lists.banned)[name] != BANNED.get(name)):
            policies[name] = policy
    return policies


def intercepted(lists: OpLists, device_type: str) -> dict[Function, tuple[Policy, str]]:
    """Each function that must be intercepted on a device, with its list and name; empty if torch.autocast, the modules
    that `apply_modules` treats, and the registrations of `kernels.register` already do all that the lists say.

    `keep` alone is no reason to intercept every call: it saves time, and interception costs some.
    """
    policies = differences(lists, device_type)
    if device_type == "cpu":
        policies = {name: policy for name, policy in policies.items() if registered().get(name) != policy}
    if all(policy == "keep" for policy in policies.values()):
        return {}
    return {function: (policy, name) for name, policy in policies.items() for function in functions_of(name)}
