"""Anatomy of Penstock's own models: the parts of `Block`, and the parts of a graph around its blocks."""

from __future__ import annotations

from typing import Any

from penstock.config.graph import (
    FeatureHead,
    Graph,
    Input,
    PatchInput,
    PixelHead,
    Run,
    VectorHead,
    WordHead,
    part_of,
)
from penstock.config.graph import Head as GraphHead
from penstock.config.layer import ExpertMixture, FeedForward, Layer
from penstock.config.stack import Stack as Sizes
from penstock.models.anatomy import Anatomy, Block, Family, Stack, Switches, enrol
from penstock.models.model import Model
from penstock.models.roles import (
    Attention,
    Dropout,
    Embedding,
    Experts,
    Head,
    Linear,
    Modulation,
    Norm,
    Perceptron,
    Pooler,
    Role,
    Scale,
    Stem,
    placed,
)
from penstock.models.stack import TokenStack


def anatomy(graph: Graph) -> Anatomy:
    """The parts of `Model(config)`, by `config.graph`."""
    tables: set[str] = set()
    stacks: list[Stack] = []
    for run in graph.runs:
        last, enters = run is graph.runs[-1], graph.enters(run)
        read = (
            {role.name: role for one in graph.inputs_through(run) for role in _input(one)} if enters else {}
        )
        shares = tuple(name for name in read if name in tables)
        before = tuple(role for name, role in read.items() if name not in tables)
        tables |= set(read)
        norm = (Norm(f"{run.name}.norm"),) if run.stack.norm_first and run.last_norm else ()
        whole = Stack(
            before=(*before, *_bridge(graph, run), *_entrance(run, enters=enters)),
            blocks=_blocks(run),
            after=(*norm, *(role for head in graph.heads if last for role in _head(head, graph))),
            shares=shares,
        )
        stacks.append(whole)
    reads = tuple(
        (index(graph, run.reads), tuple(index(graph, name) for name in run.memories)) for run in graph.runs
    )
    heads = tuple(dict.fromkeys(index(graph, head.run) for head in graph.heads))
    return Anatomy(
        family="penstock", stacks=tuple(stacks), reads=reads, read_out=heads, beside=_condition(graph)
    )


def index(graph: Graph, name: str) -> int:
    """The index of the run called `name`, or −1 if it is an input."""
    return next((i for i, run in enumerate(graph.runs) if run.name == name), -1)


def _condition(graph: Graph) -> tuple[Role, ...]:
    """The parts that compute a sample's condition."""
    one = graph.condition
    if one is None:
        return ()
    classes = (Embedding(f"{one.name}.classes", "class"),) if one.classes else ()
    return (Linear(f"{one.name}.up"), Linear(f"{one.name}.down"), *classes)


def _input(one: Input) -> tuple[Role, ...]:
    """The parts that embed an input."""
    if isinstance(one, PatchInput):
        names = {"class_token": one.class_token, "distil_token": one.distil_token}
        tokens = (Embedding(name, "class") for name, there in names.items() if there)
        registers = (Embedding("registers", "register"),) if one.registers else ()
        return (Stem("stem.proj" if one.stem == "patchify" else "stem"), *tokens, *registers)
    return (Embedding(one.table, "token"), *((Embedding("types", "segment"),) if one.segments else ()))


def _bridge(graph: Graph, run: Run) -> tuple[Role, ...]:
    """The linear that maps a run's input features to its own width."""
    return (Linear(f"{run.name}.bridge"),) if graph.width_before(run) != run.stack.width else ()


def _entrance(run: Run, *, enters: bool) -> tuple[Role, ...]:
    """The parts of a run before its blocks, in the order in which they run."""
    sizes, name = run.stack, run.name
    position = (Embedding(f"{name}.places", "position"),) if enters and sizes.positions == "learned" else ()
    relative = (Embedding(f"{name}.relative", "relative"),) if sizes.positions == "relative" else ()
    norm = (Norm(f"{name}.embedding_norm"),) if run.embedding_norm else ()
    dropout = (Dropout(f"{name}.dropout"),) if enters and sizes.dropout else ()
    return (*position, *relative, *norm, *dropout)


def _head(head: GraphHead, graph: Graph) -> tuple[Role, ...]:
    """The parts of a head."""
    if isinstance(head, FeatureHead):
        return ()
    if isinstance(head, WordHead):
        transform = part_of(head, "transform")
        before = (Linear(f"{transform}.dense"), Norm(f"{transform}.norm")) if head.transform else ()
        return (*before, Head(head.name))
    if isinstance(head, PixelHead):
        modulation = (Modulation(part_of(head, "modulation")),) if graph.condition else ()
        return (Norm(part_of(head, "norm")), *modulation, Head(head.name))
    if isinstance(head, VectorHead):
        return (Pooler(head.name),)
    pooler = part_of(head, "pooler")
    kinds: dict[str, tuple[Role, ...]] = {
        "norm": (Norm(part_of(head, "norm")),),
        "tanh": (Pooler(pooler),),
        "transform": (Pooler(f"{pooler}.dense"), Norm(f"{pooler}.norm")),
    }
    pool = (Pooler(part_of(head, "attention_pool")),) if head.pool == "attention" else ()
    dropout = (Dropout(part_of(head, "dropout")),) if head.dropout else ()
    return (*kinds.get(head.before, ()), *pool, *dropout, *map(Head, head.linears))


def _blocks(run: Run) -> tuple[Block, ...]:
    """The blocks of a run, each with the parts that its layer has."""
    sizes = run.stack
    parts = {
        layer: _block(sizes, layer, cross=bool(run.memories), modulated=run.modulated)
        for layer in sizes.kinds
    }
    return tuple(
        Block(name := f"{run.name}.blocks.{i}", placed(parts[layer], f"{name}."), beside=bool(expert))
        for i, (layer, expert) in enumerate(zip(sizes.layers, sizes.experts_of_blocks))
    )


def _block(sizes: Sizes, layer: Layer, *, cross: bool = False, modulated: bool = False) -> tuple[Role, ...]:
    """The parts of `Block`."""

    def closed(name: str) -> tuple[Role, ...]:
        return (
            *((Norm(f"{name}.norm"),) if layer.norms_branches else ()),
            *((Scale(f"{name}.scale"),) if layer.layer_scale is not None else ()),
            *((Dropout(name),) if sizes.dropout or sizes.drop_path else ()),
        )

    # Rows of queries, keys and values are ordered by head, so that they can be split as one matrix.
    inside = (
        _latent(layer)
        if layer.latent
        else _attention(layer, "attention", (Linear("attention.qkv", "column"),))
    )
    between: tuple[Role, ...] = ()
    before = layer.placement != "branch"
    if cross:
        projections = Linear("cross.q", "column"), Linear("cross.kv", "column")
        between = (
            *((Norm("cross_norm"),) if before else ()),
            _attention(layer, "cross", projections),
            *closed("cross_branch"),
        )
    return (
        *((Modulation("modulation"),) if modulated else ()),
        *((Norm("norm1"),) if layer.normed and before else ()), inside, *closed("branch1"), *between,
        *((Norm("norm2"),) if before and not layer.parallel else ()),
        _experts(layer.mixture) if layer.mixture else _perceptron(layer.perceptron, "mlp"),
        *((Dropout("mlp.dropout"),) if sizes.hidden_dropout else ()), *closed("branch2"),
    )  # fmt: skip


def _perceptron(sizes: FeedForward, name: str) -> Perceptron:
    up = Linear(f"{name}.up", "column", fused=(1, 1) if sizes.gated else (1,))
    return Perceptron(name, up=up, down=Linear(f"{name}.down", "row"))


def _experts(sizes: ExpertMixture) -> Experts:
    one = _perceptron(sizes.expert, "mlp")
    return Experts(
        "mlp", router=Linear("mlp.router") if sizes.learns_routes else None, up=one.up, down=one.down,
        count=sizes.experts, shared=_perceptron(sizes.expert, "mlp.shared") if sizes.shared_experts else None,
    )  # fmt: skip


def _latent(layer: Layer) -> Attention:
    queries = bool(layer.latent and layer.latent.query_rank)
    downs = ("attention.q_down", "attention.kv_down")[not queries :]
    return Attention(
        "attention", projections=(Linear("attention.q_up", "column"), Linear("attention.kv_up", "column")),
        latents=tuple(map(Linear, downs)), out=Linear("attention.out", "row"), heads=layer.heads, kv_heads=layer.heads,
        norms=tuple(Norm(name.replace("down", "norm")) for name in downs),
    )  # fmt: skip


def _attention(layer: Layer, name: str, projections: tuple[Linear, ...]) -> Attention:
    return Attention(
        name, projections=projections, out=Linear(f"{name}.out", "row"), heads=layer.heads,
        kv_heads=layer.kv_heads,
        norms=(Norm(f"{name}.q_norm"), Norm(f"{name}.k_norm")) if layer.qk_norm else (),
        sinks=Embedding(f"{name}.sinks", "sink") if layer.sinks and name == "attention" else None,
        shift=Embedding(f"{name}.shift", "shift") if layer.shifted and name == "attention" else None,
        cross=len(projections) == 2,
    )  # fmt: skip


def _recompute_scores(model: Any, name: str) -> None:
    block: Any = model.get_submodule(name)
    for part in (block.attention, block.cross):
        if part is not None:
            part.scores_again = True


def _set_heads(model: Any, place: tuple[int, int]) -> None:
    index, count = place
    for module in model.modules():
        if isinstance(module, TokenStack):
            share = module.sizes.heads // count
            module.heads = slice(index * share, (index + 1) * share)


def _switches(model: Model) -> Switches:
    """The switches for the fields of a Plan that apply to a model's graph."""
    switches: dict[str, Any] = {
        "attention": Model.set_attention, "token_order": Model.set_token_order,
        "recompute": _recompute_scores, "cp": Model.share_tokens, "tp": _set_heads,
    }  # fmt: skip
    if model.graph.words is not None:
        switches["loss"] = Model.set_loss
    if any(layer.mixture for run in model.graph.runs for layer in run.stack.layers):
        switches["experts"] = Model.set_experts
    if model.graph.padded:
        switches["padding"] = Model.set_padding
    return switches


enrol("penstock.models.model.Model", Family(anatomy=lambda model: anatomy(model.graph), switches=_switches))
