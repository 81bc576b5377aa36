"""Pipeline parallelism: which stage holds which blocks, and how a model runs one stage of them.

A model keeps its structure and its names on every rank. Parts held by other ranks are emptied: their parameters are
None. A stage runs the model's own `forward` on the batch, with stand-ins for the parts that it does not hold:

- parts before the blocks return zeros of the right shape, from which masks and positions are made;
- the block before the stage's first returns the values that the previous stage has sent;
- the block after its last ends the forward pass, with the values that the next stage needs.

So every family runs unchanged, and masks and rotations are made on each stage and not sent. An encoder's output, the
memory, is sent from stage to stage with the tokens, and its gradient comes back the same way, each stage's added to it.

A parameter that several stages use is on each of them, under the same names: tied embeddings, and biases by distance
that all blocks of a stack share. Their gradients are summed (`Stages.add_shared`), so that they stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from penstock.config.graph import Graph
from penstock.containers import tensors
from penstock.kernels.split_linear import SplitBackward
from penstock.models.anatomy import ELSEWHERE, WHOLE, anatomy_of, closest_part
from penstock.models.roles import Linear, walk
from penstock.models.wrap import Around, put_around, swap
from penstock.optim.clip import grad_norm
from penstock.optim.tensors import local
from penstock.parallel.dims import ParallelDims
from penstock.parallel.sequence import Line
from penstock.parallel.stage_cut import Carried, StageCut, places_of
from penstock.parallel.stand_in import Blank, Left, entry, exit_, passing, tap
from penstock.parallel.tensor import lines_of

Values = tuple[Tensor, ...]
"""Tensors that one stage sends to the next: outputs of stacks, and tokens between two blocks."""


class _Dispatched(Around):
    """Runs the active stage, or all stages, when a model is called."""

    kind = "stages"

    def __init__(self, stages: Stages) -> None:
        super().__init__(stages.model.forward)
        self.stages = stages

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.stages.dispatch(*args, **kwargs)


@dataclass(slots=True)
class Stages:
    """This rank's stages of a model that was cut. `model(…)` runs all stages of all ranks one after the other, and
    returns the outputs on each; `run` runs one.
    """

    model: nn.Module
    cut: StageCut
    dims: ParallelDims
    device: torch.device
    local_stages: tuple[int, ...]
    shared_parameters: list[tuple[str, tuple[int, ...]]]
    """Names of parameters that other ranks hold too, with the pipeline coordinates of all these ranks."""
    places: dict[str, frozenset[int]]
    emptied: dict[nn.Module, dict[str, Tensor]]
    """Tensors of emptied modules, without values."""
    fixed: bool = True
    """Whether the shapes of tensors sent between stages follow from the batch's shapes."""
    dtype: torch.dtype = torch.float32
    """Type of the model's weights."""
    lines: Sequence[Line] = ()
    """For each stack, how its tokens are split over tensor-parallel ranks."""
    _forward: Callable[..., Any] | None = None
    _active: tuple[int, Values] | None = None
    _stand_ins: dict[int, list[tuple[Any, str, Any]]] = field(default_factory=dict)
    _blanks: dict[str, Blank] = field(default_factory=dict)
    _shapes: dict[Any, list[torch.Size]] = field(default_factory=dict)
    _made: dict[Carried, Tensor] = field(default_factory=dict)
    """Values of this pass that a later stage receives."""
    _probing: bool = False

    @property
    def last(self) -> int:
        """Number of the last stage."""
        return self.cut.stages - 1

    def rank_of(self, stage: int) -> int:
        """Pipeline coordinate of the rank that holds a stage."""
        return stage % self.dims.pp

    # -- running

    def attach(self) -> None:
        """From now on calls of the model run stages. Call it after everything that replaces the class's `forward`."""
        self._forward = self.model.forward
        put_around(self.model, _Dispatched(self))

    def run(self, stage: int, received: Values, call: Callable[[], Any]) -> Any:
        """Call `call`, in which the model runs `stage` on the values that it has `received`. Returns the values that
        the stage sends or, for the last stage, the model's outputs.
        """
        self._active = stage, received
        try:
            return call()
        finally:
            self._active = None

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        if self._active is None:
            return self._run_all(*args, **kwargs)
        return self._run_stage(self._active[0], *args, **kwargs)

    def _run_stage(self, stage: int, *args: Any, **kwargs: Any) -> Any:
        assert self._forward is not None
        self._made.clear()
        if self._is_remembered(stage, args, kwargs):
            return ()
        with self._with_stand_ins(stage):
            try:
                return self._forward(*args, **kwargs)
            except Left as left:
                return left.values

    def _is_remembered(self, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the KV cache (`past`) holds all results of a stage: it has only stacks before the generating one."""
        graph: Graph | None = getattr(self.model, "graph", None)
        if kwargs.get("past") is None or graph is None or not graph.remembered:
            return False
        arguments = dict(zip(graph.arguments, args)) | kwargs
        writes = self.cut.starts[graph.runs.index(graph.written[0])]
        inputs = (run.reads for run in graph.remembered if graph.enters(run))
        return all(arguments.get(name) is None for name in inputs) and self.cut.edges[stage + 1] <= writes

    def _run_all(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages one after the other; every rank gets the outputs of the last."""
        from penstock.parallel.links import Links

        links, outputs = Links(self.dims, self.device), None
        for stage in self.local_stages:
            received: Values = ()
            if stage:
                shapes = self.expected(stage, args, kwargs)
                received = links.receive(stage - 1, self.rank_of(stage - 1), shapes)
                links.wait(received)
            outputs = self.run(stage, received, partial(self._run_stage, stage, *args, **kwargs))
            if stage < self.last:
                links.send(stage, self.rank_of(stage + 1), outputs)
        links.finish()
        return links.everywhere(outputs, self.rank_of(self.last))

    def expected(
        self, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> list[torch.Size]:
        """Shapes of the values that a stage receives for a batch, computed without values."""
        kwargs = kwargs or {}
        key = (stage, *(tuple(t.shape) for t in tensors((args, kwargs))), *(type(a) for a in args), *kwargs)
        if self.fixed and key in self._shapes:
            return self._shapes[key]
        assert self._forward is not None
        shapes: list[torch.Size] = []  # stays empty for a stage whose inputs a past already holds
        self._probing, before = True, self._active
        self._active = stage, ()
        self._made.clear()
        try:
            # Dropout that the family does not declare would draw random numbers, but probing must have no effect.
            kept_generator = torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])
            with kept_generator, torch.no_grad(), self._with_stand_ins(stage, probing=True):
                self._forward(*args, **kwargs)
        except Left as left:
            shapes = [value.shape for value in left.values]
        finally:
            self._probing, self._active = False, before
        if len(self._shapes) > 1024:
            self._shapes.clear()
        self._shapes[key] = shapes
        return shapes

    # -- stand-ins

    @contextmanager
    def _with_stand_ins(self, stage: int, *, probing: bool = False) -> Iterator[None]:
        """Replace the parts that a stage does not hold by stand-ins, inside the context."""
        key = -1 - stage if probing else stage
        if key not in self._stand_ins:
            self._stand_ins[key] = list(self._replacements(stage, probing=probing))
        changes = self._stand_ins[key]
        before = [getattr(owner, name, None) for owner, name, _ in changes]
        try:
            for owner, name, new in changes:
                if isinstance(new, nn.Module):
                    setattr(owner, name, new)
                else:
                    owner.__dict__[name] = new  # it hides a parameter of that name
            yield
        finally:
            for (owner, name, _), old in zip(changes, before):
                if name in owner.__dict__:
                    del owner.__dict__[name]
                else:
                    setattr(owner, name, old)

    def _replacements(self, stage: int, *, probing: bool) -> Iterator[tuple[Any, str, Any]]:
        anatomy, cut = anatomy_of(self.model), self.cut
        first, end = cut.edges[stage], cut.edges[stage + 1]
        received = cut.carried[stage]
        sent = cut.carried[stage + 1] if stage < self.last else ()
        for number, stack in enumerate(anatomy.stacks):
            last = stack is anatomy.stacks[-1]
            output = Carried(number, done=True)
            made_by = stack.after[-1].name if stack.after and not last else stack.blocks[-1].name
            for role in (*stack.before, *(() if last else stack.after)):
                if (probing or stage not in self.places[role.name]) and role.name != made_by:
                    yield self._blank(role.name)
            names = [block.name for block in stack.blocks]
            for at, name in enumerate(names, cut.starts[number]):
                module, new = self.model.get_submodule(name), None
                if at > end:
                    break
                if name == made_by and output in received:
                    new = entry(self, module, output, received)
                elif at == first - 1 and Carried(number, done=False) in received:
                    new = entry(self, module, Carried(number, done=False), received)
                elif probing or at < first:
                    new = passing(module)
                elif at == end:
                    new = exit_(self, module, sent)
                elif name == made_by and output in sent:
                    new = tap(self, module, output)
                if new is not None:
                    yield (*_owner(self.model, name), new)
            if made_by not in names:
                yield from self._at_output(stage, made_by, output, probing=probing)

    def _at_output(
        self, stage: int, name: str, output: Carried, *, probing: bool
    ) -> Iterator[tuple[Any, str, Any]]:
        """The stand-in for the norm after a stack's blocks."""
        module, received = self.model.get_submodule(name), self.cut.carried[stage]
        if output in received:
            yield (*_owner(self.model, name), entry(self, module, output, received))
        elif probing or stage not in self.places[name]:
            yield self._blank(name)
        else:
            yield (*_owner(self.model, name), tap(self, module, output))

    def _blank(self, name: str) -> tuple[Any, str, Any]:
        owner, key = _owner(self.model, name)
        if name not in self._blanks:
            self._blanks[name] = Blank(self, owner, key)
        return owner, key, self._blanks[name].instead()

    def like(self) -> torch.dtype:
        """Type of the tokens of the running stage; else the type of the weights."""
        received = self._active[1] if self._active else ()
        return received[0].dtype if received else self.dtype

    # -- what ranks share

    def _parameter(self, name: str) -> Tensor:
        """The parameter itself, even if a split module's attribute returns this rank's part of it."""
        owner, key = _owner(self.model, name)
        parameter: Tensor | None = owner._parameters[key]
        assert parameter is not None
        return parameter

    @torch.no_grad()
    def add_shared(self, gradient_of: Callable[[Tensor], Tensor]) -> None:
        """Sum the gradients of parameters that several stages use, on each of them. `gradient_of` returns the parameter
        that holds a parameter's gradient. Sums are made in the order of stages, so that all are equal.
        """
        group = self.dims.group("pp")
        place = self.dims.place()["pp"]
        for name, ranks in self.shared_parameters:
            parameter = self._parameter(name)
            if not parameter.requires_grad:
                continue
            holder = gradient_of(parameter)
            if holder.grad is None:
                holder.grad = torch.zeros_like(holder)
            gradient = local(holder.grad)
            gradients, works = {place: gradient.contiguous().clone()}, []
            for rank in ranks:
                if rank != place:
                    gradients[rank] = torch.empty_like(gradients[place])
                    works.append(distributed.irecv(gradients[rank], group=group, group_src=rank))
                    works.append(distributed.isend(gradients[place], group=group, group_dst=rank))
            for work in works:
                if work is not None:
                    work.wait()
            total = gradients[ranks[0]].clone()
            for rank in ranks[1:]:
                total += gradients[rank]
            gradient.copy_(total)

    @torch.no_grad()
    def whole_norm(self, norm: Tensor, gradient_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The norm of all stages' gradients, on all of them, from this rank's norm; gradients held by several ranks
        count once."""
        place, dtype = self.dims.place()["pp"], norm.dtype
        square = norm.to(self.device, torch.float64).square()
        names = [name for name, ranks in self.shared_parameters if ranks[0] != place]
        repeated = [gradient_of(self._parameter(name)).grad for name in names]
        counted_again = [gradient for gradient in repeated if gradient is not None]
        if counted_again:
            square = (square - grad_norm(counted_again).double().square()).clamp(min=0.0)
        distributed.all_reduce(square, group=self.dims.group("pp"))
        return square.sqrt().to(dtype)


def cut_stages(
    model: nn.Module, counts: Sequence[int], dims: ParallelDims, device: torch.device, *, fixed: bool
) -> Stages:
    """Keep this rank's stages of `model`, in place; `counts` is the number of blocks in each stage. Stage s is on the
    rank with pipeline coordinate s mod pp.

    Call it before anything uses the model's parameters, and `Stages.attach` once its class is final. `fixed` says
    whether shapes inside the model follow from the batch's. Raises ConfigError for a model that cannot be cut.
    """
    anatomy = anatomy_of(model)
    cut = StageCut.of(anatomy, counts)
    places = places_of(anatomy, cut)
    place = dims.place()["pp"]
    local_stages = tuple(stage for stage in range(cut.stages) if stage % dims.pp == place)
    users: dict[int, set[int]] = {}
    every = frozenset(range(cut.stages))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), set()).update(closest_part(places, name) or every)
    shared_parameters = [
        (name, ranks)
        for name, parameter in model.named_parameters()
        if place in (ranks := tuple(sorted({stage % dims.pp for stage in users[id(parameter)]})))
        and len(ranks) > 1
    ]
    emptied: dict[nn.Module, dict[str, Tensor]] = {}
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if users[id(parameter)].isdisjoint(local_stages):
                unfilled = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                emptied.setdefault(module, {})[key] = unfilled
                setattr(module, key, None)
    for block, name in enumerate(anatomy.blocks):
        if cut.stage_of(block) not in local_stages:
            elsewhere = model.get_submodule(name)
            elsewhere.__dict__[ELSEWHERE] = True
            for module in elsewhere.modules():
                for key, _ in list(module.named_buffers(recurse=False)):
                    setattr(module, key, None)  # another rank saves it; here it would not be updated
    model.__dict__[WHOLE] = anatomy
    dtype = next(model.parameters()).dtype
    parts = local_stages, shared_parameters, places, emptied
    return Stages(model, cut, dims, device, *parts, fixed, dtype, lines_of(model))


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, key = name.rpartition(".")
    return model.get_submodule(parent), key


def split_backwards(model: nn.Module) -> None:
    """Make the linears of blocks compute the gradients of their weights separately, for a zero-bubble schedule. Call it
    after their classes are final.
    """
    modules = dict(model.named_modules())
    for stack in anatomy_of(model).stacks:
        for role in walk(stack.blocks):
            module = modules.get(role.name)
            if isinstance(role, Linear) and type(module) is nn.Linear:
                swap(module, SplitBackward)
