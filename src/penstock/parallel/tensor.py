"""Tensor parallelism: the ranks of a group split each layer (Shoeybi et al., "Megatron-LM", 2019, section 3), by role.

| part | how it is split | what is sent |
|---|---|---|
| attention | its first linears by heads, its last by inputs | gradients of its input, sums of its output |
| perceptron | the same, by hidden features | the same |
| table of tokens | by entries of the vocabulary | sums of the vectors looked up |
| output over the vocabulary | by entries | gradients of its input; three numbers per row for the loss |
| relative positions, sinks | by heads | nothing |
| mixture | each expert as a perceptron; with `ep` experts are whole, and a rank routes some tokens | the same |
| adapter of a split linear | B by outputs, or A by inputs, as the linear is | sums of A's few outputs |
| norm of all heads' queries or keys | not split | sums of squares |
| all others, such as linears to latents | not split: each rank has it whole | nothing |

With sequence parallelism tokens are split between the first block and the end of a stack, and the parts between the
split layers work on a rank's own tokens: see `penstock.parallel.sequence`.

Split weights become DTensors on the mesh dimension `tp`, so clipping, optimizers, checkpoints and `fully_shard` know
their layout. The classes of their modules are swapped for subclasses that compute with this rank's part; names stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.kernels.vocabulary import Share
from penstock.models.anatomy import Anatomy, Stack, anatomy_of, switch_for, uncompiled
from penstock.models.experts import MixtureOfExperts
from penstock.models.lora import BASE, FIRST, SECOND, is_adapted
from penstock.models.roles import (
    Attention,
    Embedding,
    Experts,
    Head,
    Linear,
    Modulation,
    Norm,
    Perceptron,
    Pooler,
    Role,
    owned,
    walk,
)
from penstock.models.rounded import CLIP
from penstock.models.wrap import swap
from penstock.optim.tensors import local
from penstock.parallel import sequence
from penstock.parallel.data import broadcast
from penstock.parallel.dims import LOSS, ParallelDims
from penstock.parallel.experts import Neighbours, Slices, Visits, split_experts
from penstock.parallel.parts import (
    SplitInputs,
    SplitModule,
    SplitNorm,
    SplitTable,
    SplitWords,
    SumGradient,
    as_dtensor,
    cut_to_fit,
)
from penstock.parallel.sequence import Line

BEGINS, ENDS = "penstock_begins", "penstock_ends"
"""Attributes of the modules before which tokens are split, and after which they are gathered: their `Line`."""


@dataclass(slots=True)
class Split:
    """Facts about a split model that a training step needs."""

    partial: list[str] = field(default_factory=list)
    """Names of weights that each rank has whole, but with partial gradients: the sum over ranks is the gradient."""


def split_layers(model: nn.Module, plan: Plan, dims: ParallelDims, *, alike: bool = False) -> Split:
    """Split the layers of `model` over the ranks of `dims`, and experts as `plan.ep` says, in place: same object, same
    names, same results.

    Weights may be on the host, then a rank's parts go to its device, or on the meta device. All ranks first get rank
    0's weights, unless they are `alike` already. Raises ConfigError, with the possible degrees, if a part cannot be
    split.
    """
    anatomy = anatomy_of(model)
    if plan.tp > 1:
        _require_roles(anatomy, model)
        _require_even(anatomy, model, plan.tp)
    if not alike and not any(parameter.is_meta for parameter in model.parameters()):
        for names in ("tp",), LOSS:
            if dims.degree(*names) > 1:
                broadcast(model, dims, names)
    if plan.ep > 1:
        split_experts(model, dims)
    if plan.tp == 1:
        return Split()
    assert dims.mesh is not None
    dim = 0 if plan.token_order == "batch_second" else 1
    place = dims.place()["tp"]
    line = Line(dims.mesh.get_group("tp"), place, plan.tp, sequence=plan.sp, dim=dim)
    # Recomputing blocks save nothing of it, and compiled code decides itself what to save.
    line.again = plan.recompute in ("none", "selective") and plan.compile == "none"
    splitter = _Splitter(uncompiled(model), anatomy, dims.mesh["tp"], line, packed=plan.padding == "remove")
    splitter.run()
    if (heads := switch_for(model, "tp")) is not None:
        heads((place, plan.tp))
    return Split(sorted(set(splitter.partial)))


def _require_roles(anatomy: Anatomy, model: nn.Module) -> None:
    name = type(uncompiled(model)).__name__
    parts = list(anatomy.parts(Attention))  # raises if the parts are unknown
    for experts in anatomy.parts(Experts):
        if not isinstance(model.get_submodule(experts.name), MixtureOfExperts):
            raise ConfigError(
                f"plan.tp cannot split the tokens of {experts.name} of {name}, a mixture that is not Penstock's own; "
                "use plan.tp=1, or penstock.from_pretrained for the model."
            )
    whole_heads = [part.name for part in parts if part.out.split == "none"]
    if whole_heads:
        raise ConfigError(
            f"plan.tp cannot split {whole_heads[0]} of {name}, which has a norm over the features of all heads; use "
            "plan.tp=1."
        )
    if len(anatomy.stacks) == 1 and any(part.cross for part in parts):
        raise ConfigError(
            f"plan.tp cannot split the cross attention of {name}, whose memory is made outside of it; use plan.tp=1."
        )


def _require_even(anatomy: Anatomy, model: nn.Module, degree: int) -> None:
    sizes: dict[str, int] = {}
    for part in anatomy.parts(Attention):
        sizes |= {f"{part.heads} attention heads": part.heads, f"{part.kv_heads} KV heads": part.kv_heads}
    for perceptron in anatomy.parts(Perceptron):
        weight = model.get_submodule(perceptron.down.name).get_parameter("weight")
        hidden = int(weight.shape[0 if perceptron.down.transposed else 1])
        sizes[f"MLP's hidden width {hidden}"] = hidden
    for what, size in sizes.items():
        if size % degree:
            fits = [n for n in range(1, min(sizes.values()) + 1) if not any(s % n for s in sizes.values())]
            raise ConfigError(
                f"plan.tp={degree} cannot split the model's {what} evenly; use a tp of {', '.join(map(str, fits))}."
            )


class _Splitter:
    """Splits all roles of a model, one by one."""

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, mesh: Any, line: Line, *, packed: bool = False
    ) -> None:
        self.model, self.anatomy, self.mesh, self.line = model, anatomy, mesh, line
        self.packed = packed
        """Whether padding is put back after the blocks and their norm, which needs all tokens."""
        self.partial: list[str] = []
        self.made: dict[int, nn.Parameter] = {}
        """DTensors by the parameters that they replace: tied weights stay tied."""

    def run(self) -> None:
        for role in walk(self.anatomy.stacks):
            if isinstance(role, Embedding) and role.kind in ("relative", "sink", "shift"):
                self._split(role, {"weight": role.split_dim or 0})
        tokens = self._vocabulary()
        for number, stack in enumerate(self.anatomy.stacks):
            line = self.line.sibling()
            memories = self.anatomy.read_by(number)[1]
            read_widely = any(not self._memory_alone(memory) for memory in memories)
            for role in walk(tuple(part for block in stack.blocks for part in block.parts)):
                if isinstance(role, Attention):
                    self._attention(role, line)
                    if read_widely and role.cross:
                        self._enters(role.projections[1].name, self._outside(line))
                elif isinstance(role, Perceptron):
                    self._perceptron(role, line)
                elif isinstance(role, Experts):
                    self._experts(role, line)
                elif isinstance(role, Modulation) and line.sequence:
                    # Its gradient is a sum over all tokens of a sample, some of which are on each rank.
                    self._enters(role.name, self._outside(line))
            self._ends(number, line, tokens)

    def _memory_alone(self, number: int) -> bool:
        """Whether only cross attention reads a stack's output: then all ranks return parts of its gradient, which are
        summed once, at the stack's end."""
        anatomy = self.anatomy
        reads = [anatomy.read_by(reader) for reader in range(number + 1, len(anatomy.stacks))]
        memory = any(number in memories for _, memories in reads)
        return memory and number not in (*anatomy.read_out, *(source for source, _ in reads))

    # -- parts

    def _attention(self, role: Attention, line: Line) -> None:
        for linear in role.projections:
            self._column(linear)
        self._row(role.out, line)
        first = role.projections[0].name
        # Several linears read the same tokens, which are therefore gathered once, at the module's first argument.
        # Memory is gathered where its stack ends, unless other parts read it too.
        self._enters(role.name if len(role.projections) > 1 else first, line)
        _divide(self._module(role.name), role.counts, line.count)
        # They act on this rank's heads only.
        self._sees_a_part(*role.norms, *role.latents)
        if getattr(self._module(role.name), "norms_heads_together", False):
            for norm in role.norms:
                swap(self._module(norm.name), SplitNorm).__dict__["penstock_line"] = line

    def _perceptron(self, role: Perceptron, line: Line) -> None:
        for linear in (role.up, role.gate):
            if linear is not None:
                self._column(linear)
        self._row(role.down, line)
        self._enters(role.up.name if role.gate is None else role.name, line)

    def _experts(self, role: Experts, line: Line) -> None:
        mixture = self._module(role.name)
        assert isinstance(mixture, MixtureOfExperts)
        if role.router is not None:
            # It gets gradients of a part of the tokens, or of a part of the experts' outputs for all.
            self._sees_a_part(role.router)
        if isinstance(mixture.exchange, Visits):
            mixture.exchange.split_over(line)
            mixture.neighbours = Neighbours(line)
            return
        mixture.exchange = Slices(line)
        self._split(role.up, {"weight": 1, "bias": 1}, pieces=len(role.up.fused))
        self._split(role.down, {"weight": 2}, line=line, spread=("bias",))

    def _column(self, linear: Linear) -> None:
        outputs = 1 if linear.transposed else 0
        pieces = len(linear.fused)
        self._split(linear, {"weight": outputs, "bias": 0}, pieces=pieces)
        _divide(self._module(self._plain(linear.name)), linear.counts, self.line.count)
        self._clips(linear)
        if is_adapted(self._module(linear.name)):
            # A's output is the same on all ranks; each rank's rows of B return a part of its gradient.
            self._split(linear, {"weight": 0}, pieces=pieces, inside=SECOND)
            self.partial.append(f"{linear.name}.{FIRST}.weight")

    def _row(self, linear: Linear, line: Line) -> None:
        self._split(
            linear, {"weight": 0 if linear.transposed else 1}, kind=SplitInputs, line=line, spread=("bias",)
        )
        self._clips(linear)
        if is_adapted(self._module(linear.name)):
            self._split(linear, {"weight": 1}, kind=SplitInputs, line=line, inside=FIRST)

    def _clips(self, linear: Linear) -> None:
        """A learned clip's gradient comes from this rank's features or outputs only."""
        if CLIP in self._module(linear.name)._parameters:
            self.partial.append(f"{linear.name}.{CLIP}")

    def _enters(self, name: str, line: Line) -> None:
        module = self._module(name)
        swap(module, SumGradient).__dict__["penstock_enters"] = line

    def _vocabulary(self) -> bool:
        """Split the tables of tokens, and outputs with equally many rows; returns whether there are such outputs."""
        tables = [r for r in self.anatomy.parts(Embedding) if r.kind == "token"]
        if not tables:
            return False
        rows = {self._module(role.name).get_parameter("weight").shape[0] for role in tables}
        heads = [r for r in self.anatomy.parts(Head) if self._output(r) in rows]
        step = -(-max(rows) // self.line.count)
        users = {f"{role.name}.weight" for role in (*tables, *heads)}
        held = {id(self._module(role.name).get_parameter("weight")) for role in tables}
        only_users = all(
            name in users for name, p in self.model.named_parameters(remove_duplicate=False) if id(p) in held
        )
        every: list[Any] = [self._module(role.name) for role in tables]
        plain = all(
            isinstance(t, nn.Embedding) and t.max_norm is None and not t.scale_grad_by_freq for t in every
        )
        if len(rows) > 1 or step * (self.line.count - 1) >= max(rows) or not only_users or not plain:
            return False
        for role in tables:
            self._split(role, {"weight": 0}, kind=SplitTable, line=self.line)
        for head in heads:
            self._split(head, {"weight": 0, "bias": 0}, kind=SplitWords, line=self.line)
        return bool(heads)

    def _output(self, head: Head) -> int:
        weight = getattr(self._module(head.name), "weight", None)
        return -1 if weight is None or head.transposed or head.bias is not None else int(weight.shape[0])

    # -- where tokens are split and gathered

    def _ends(self, number: int, line: Line, words: bool) -> None:
        """Add hooks at both ends of a stack, and record the weights that therefore get partial gradients."""
        stack: Stack = self.anatomy.stacks[number]
        last, memory = stack is self.anatomy.stacks[-1], self._memory_alone(number)
        tail = list(walk(stack.after))
        heads = [role for role in tail if isinstance(role, Head)]
        others = any(isinstance(role, Pooler) or type(role) is Role for role in tail)
        norms = stack.after[:1] if self.packed else tail
        norm = next((role.name for role in norms if isinstance(role, Norm)), "")
        single_head = len(heads) == 1 and self.anatomy.read_out in ((), (number,))
        into_words = last and words and single_head and not others and (bool(norm) or not self.packed)
        # After the last norm, if the following parts sum partial gradients; else after the last block, as in a Vision
        # Transformer, which picks a token before its norm.
        read = into_words or memory
        end = self._module(norm if read and norm else stack.blocks[-1].name)
        for head in heads:
            if hasattr(self._module(head.name), "penstock_words") and not (line.sequence and into_words):
                swap(self._module(head.name), SumGradient).__dict__["penstock_enters"] = self._outside(line)
        if not line.sequence:
            if memory:
                end.register_forward_hook(functools.partial(_after, lambda x: sequence.copy(x, line)))
            return
        first = self._module(stack.blocks[0].name)
        first.register_forward_pre_hook(functools.partial(_before, line), with_kwargs=True)
        come = sequence.gather if read else sequence.unite
        end.register_forward_hook(functools.partial(_after, lambda x: come(x, line)))
        first.__dict__[BEGINS] = end.__dict__[ENDS] = line
        self._sees_a_part(*(role for block in stack.blocks for role in walk(block.parts)))
        if read:
            self._sees_a_part(*tail)

    def _outside(self, line: Line) -> Line:
        """A line of the same ranks on which all ranks have all tokens."""
        plain = line.sibling()
        plain.sequence = False
        return plain

    # -- weights

    def _module(self, name: str) -> nn.Module:
        return self.model.get_submodule(name)

    def _plain(self, name: str) -> str:
        """Name of the module with a role's own weights; in a linear with an adapter it is nested."""
        return f"{name}.{BASE}" if is_adapted(self._module(name)) else name

    def _sees_a_part(self, *roles: Role) -> None:
        """Record the weights of these roles that each rank has whole, but with partial gradients."""
        for role in roles:
            for owner in owned(role):
                for name, parameter in self.model.named_parameters():
                    inside = name == owner or name.startswith(f"{owner}.")
                    if inside and not hasattr(parameter, "placements") and not self._spread(name):
                        self.partial.append(name)

    def _spread(self, name: str) -> bool:
        """Whether it is the bias of a linear whose outputs are summed over ranks: its gradient is complete."""
        module, _, key = name.rpartition(".")
        return key in getattr(self._module(module), "penstock_spread", ())

    def _split(
        self, role: Role, where: dict[str, int], *, kind: type = SplitModule, pieces: int = 1,
        line: Line | None = None, spread: tuple[str, ...] = (), inside: str = "",
    ) -> None:  # fmt: skip
        """Split parameters of a role's module, or of the module `inside` it; `where` maps their names to dimensions."""
        module = self._module(f"{role.name}.{inside}" if inside else self._plain(role.name))
        if isinstance(role, Linear) and role.bias is not None:
            raise ConfigError(
                f"plan.tp cannot split {role.name}, whose bias another module holds; use plan.tp=1."
            )
        swap(module, kind)
        if line is not None:
            module.__dict__["penstock_line"] = line
        module.__dict__["penstock_spread"] = tuple(n for n in spread if module._parameters.get(n) is not None)
        for name, dim in where.items():
            parameter = module._parameters.get(name)
            if parameter is not None and not hasattr(parameter, "placements"):
                module._parameters[name] = self._shared(parameter, dim, pieces)
        if kind in (SplitTable, SplitWords):
            weight: Any = module._parameters["weight"]
            rows = int(weight.shape[0])
            share = Share(self.line.group, self.line.index * -(-rows // self.line.count), rows)
            module.__dict__["penstock_words"] = share
            if (padding := module.__dict__.get("padding_idx")) is not None:  # a row that gets no gradient
                held = range(share.start, share.start + len(weight.to_local()))
                module.__dict__["padding_idx"] = held.index(padding) if padding in held else None
            if hasattr(module, "share"):  # it computes the loss itself
                setattr(module, "share", share)  # noqa: B010 (for mypy)
        module.register_load_state_dict_pre_hook(cut_to_fit)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _shared(self, parameter: nn.Parameter, dim: int, pieces: int) -> nn.Parameter:
        made = self.made.get(id(parameter))
        if made is None:
            part = as_dtensor(parameter.detach(), dim, pieces, self.mesh)
            made = nn.Parameter(part, requires_grad=parameter.requires_grad)
            self.made[id(parameter)] = made
        return made


def _divide(module: nn.Module, names: tuple[str, ...], count: int) -> None:
    for name in names:
        if hasattr(module, name):
            setattr(module, name, getattr(module, name) // count)


def _before(line: Line, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return (sequence.divide(args[0], line), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: sequence.divide(kwargs[name], line)}


def _after(change: Callable[[Tensor], Tensor], module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return change(output)
    return type(output)((change(output[0]), *output[1:]))


def line_of(model: nn.Module) -> Line | None:
    """The line of ranks that split each layer; None if layers are whole."""
    lines = (module.__dict__.get("penstock_line") for module in model.modules())
    return next((line for line in lines if line is not None), None)


def lines_of(model: nn.Module) -> list[Line]:
    """For each stack, how its tokens are split."""
    return [module.__dict__[BEGINS] for module in model.modules() if BEGINS in module.__dict__]


def partial_gradients(model: nn.Module, split: Split) -> Iterator[Tensor]:
    """This rank's partial gradients, which must be summed over the tensor-parallel ranks."""
    wanted = set(split.partial)
    for name, parameter in model.named_parameters():
        if name in wanted and parameter.grad is not None:
            yield local(parameter.grad)
