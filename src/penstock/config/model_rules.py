"""Rules that a model must meet: those of its graph, and those of each stack of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from penstock.config.graph import Graph, Head, PatchInput, PixelHead, Run, TokenInput, WordHead
from penstock.config.stack import Stack


def model_problems(graph: Graph) -> Iterator[str]:
    """Every reason why a model with this graph is impossible."""
    labels = {run.stack.labels for run in graph.runs if run.stack.experts}
    if len(labels) > 1:
        yield (
            f"The stacks with experts have {' and '.join(map(str, sorted(labels)))} labels, but all see the same "
            "samples; give all the same number."
        )
    for one in graph.inputs_of(PatchInput):
        if one.image_size % one.patch_size:
            down = one.image_size // one.patch_size * one.patch_size
            near = f"{down} or {down + one.patch_size}" if down else f"{one.patch_size}"
            yield (
                f"model.image_size {one.image_size} is not a multiple of model.patch_size {one.patch_size}; "
                f"the nearest multiples are {near}."
            )
    known = [one.name for one in graph.inputs]
    for run in graph.runs:
        yield from _run_problems(graph, run, known)
        known.append(run.name)
    for head in graph.heads:
        yield from _head_problems(graph, head)


def _run_problems(graph: Graph, run: Run, known: list[str]) -> Iterator[str]:
    """Every reason why a run is impossible; `known` are the inputs and runs before it."""
    yield from stack_problems(run.stack, run.setting)
    for name in (run.reads, *run.more_inputs, *run.memories):
        if name not in known:
            yield f"The run {run.name} reads {name}, which does not come before it, as {', '.join(known)} do."
    if run.reads in known:
        yield from _reading_problems(graph, run)
    over_images = isinstance(graph.input_of(run), PatchInput)
    if run.stack.positions == "axial" and not over_images:
        yield (
            f"{run.setting}.positions axial are for patches of images, but the run {run.name} reads tokens; "
            "use positions rotary."
        )
    if run.memories and run.stack.parallel:
        yield (
            f"{run.setting}.parallel is true, but a block with cross attention between attention and MLP "
            "cannot run both in parallel; set it to false."
        )
    if run.modulated:
        yield from _problems_of_modulated(graph, run)
    if run.stack.experts_in == "block" and (run.causal or not over_images):
        yield (
            f"{run.setting}.experts_in is block, which only a run over images can have, whose samples are "
            "equally long and see all their tokens; leave it out."
        )


def _head_problems(graph: Graph, head: Head) -> Iterator[str]:
    """Every reason why a head cannot read its run."""
    names = [run.name for run in graph.runs]
    if head.run not in names:
        yield f"The head {head.name} reads {head.run}, which is not a run; name one of {', '.join(names)}."
        return
    run = graph.run(head.run)
    one, through = graph.input_of(run), graph.inputs_through(run)
    if isinstance(head, PixelHead) and not (isinstance(one, PatchInput) and one.length == one.patches):
        yield (
            f"The head {head.name} makes a patch from each token, but {head.run} does not read only patches; "
            "name a run over images without a class token."
        )
    if len(through) > 1:
        yield f"The head {head.name} reads {head.run}, which is over several inputs; name a run over one."
    tables = [each for each in graph.inputs_of(TokenInput) if each.table == getattr(head, "tied", None)]
    width = graph.width_of(tables[0]) if tables else run.stack.width
    if isinstance(head, WordHead) and width != run.stack.width:
        yield (
            f"The head {head.name} shares the table {head.tied} of {width} features, but "
            f"{run.setting}.width is {run.stack.width}; make them equal, or set model.tied to false."
        )


def _problems_of_modulated(graph: Graph, run: Run) -> Iterator[str]:
    if graph.condition is None:
        yield f"The run {run.name} is modulated, but the graph has no condition; give it one."
    if run.causal or not isinstance(graph.input_of(run), PatchInput):
        yield f"The run {run.name} is modulated, which only runs over images can be."
    if not run.stack.norm_first or run.stack.parallel or run.stack.layers[0].norms_branches:
        yield (
            f"{run.setting}.norm_first is {str(run.stack.norm_first).lower()} and {run.setting}.parallel "
            f"{str(run.stack.parallel).lower()}, but a condition modulates norms before each branch; set them to "
            f"true and false, and {run.setting}.sandwich_norms to false."
        )


def _reading_problems(graph: Graph, run: Run) -> Iterator[str]:
    """Every reason why a run cannot compute what it reads."""
    tables = _tables_of(graph, run)
    for other in graph.runs[: graph.runs.index(run)]:
        if tables & _tables_of(graph, other) and other.stack.width != run.stack.width:
            yield (
                f"{other.setting}.width {other.stack.width} and {run.setting}.width {run.stack.width} differ, but "
                f"both read the table {min(tables)}, whose rows have one width; make them equal."
            )
    through = graph.inputs_through(run)
    if run.input and len(through) != 1:
        yield f"The run {run.name} computes samples of {run.input}, which is not an input."
    if len(through) == 1:
        return
    if not graph.enters(run) or run.memories or any(not isinstance(one, TokenInput) for one in through):
        yield (
            f"The run {run.name} computes samples of several inputs, but only a run without memories that reads "
            "inputs of tokens can; name the one that it is for in `input`."
        )
    elif len({one.length for one in through}) > 1:
        yield f"The inputs {' and '.join(one.name for one in through)} of the run {run.name} differ in length."
    masks = {graph.hides_later(run, one) for one in through}
    if len(masks) > 1 and (run.stack.positions == "relative" or run.stack.chooses_by_sample):
        yield (
            f"{run.setting} has relative positions, or experts that are chosen by sample, which a run over inputs "
            "with different masks cannot have; use other positions, and another router."
        )


def _tables_of(graph: Graph, run: Run) -> set[str]:
    """The tables of tokens that a run reads."""
    inputs = graph.inputs_through(run) if graph.enters(run) else ()
    return {one.table for one in inputs if isinstance(one, TokenInput)}


def stack_problems(stack: Stack, where: str) -> Iterator[str]:
    """Every reason why a stack is impossible; `where` is its name, such as `model.encoder`."""
    for problems in (
        _attention_problems, _position_problems, _latent_problems, _window_problems, _norm_problems,
        _unequal_problems, _router_problems, _label_problems, _routed_problems,
    ):  # fmt: skip
        yield from problems(stack, where)


def _attention_problems(stack: Stack, where: str) -> Iterator[str]:
    """Problems of a stack's attention heads."""
    if stack.head_features is None and stack.latent is None and stack.width % stack.heads:
        yield (
            f"{where}.width {stack.width} cannot be split over {where}.heads {stack.heads}; use a number of heads "
            f"that divides {stack.width}, or set {where}.head_features."
        )
    if stack.kv_heads is not None and stack.heads % stack.kv_heads:
        yield (
            f"{where}.kv_heads is {stack.kv_heads}, but must divide {where}.heads {stack.heads}, "
            "because each serves the same number of query heads."
        )
    if stack.qk_norm_whole and not (stack.qk_norm and stack.norm == "rms" and not stack.norm_zero_centred):
        yield (
            f"{where}.qk_norm_whole is for {where}.qk_norm true with {where}.norm rms and "
            f"{where}.norm_zero_centred false; set these, or leave it out."
        )


def _position_problems(stack: Stack, where: str) -> Iterator[str]:
    """Problems of a stack's positions."""
    features = stack.layers[0].rotary_width
    turned, rotary = stack.rotary.turned(features), stack.rotary
    if stack.positions == "rotary" and (turned % 2 or not turned):
        widths = f"{where}.latent.rotary_width" if stack.latent else f"{where}.heads, {where}.head_features"
        yield (
            f"{where}.positions rotary turns pairs of features, but {turned} of a head's {features} turn; choose "
            f"{widths} or {where}.rotary.share so that it is an even number."
        )
    if stack.positions == "axial" and (turned % 4 or not turned):
        yield (
            f"{where}.positions axial turns pairs of features by row and by column, but {turned} of a head's "
            f"{features} turn; choose {where}.heads or {where}.head_features so that it is a multiple of 4."
        )
    pairs = turned // 2 if rotary.scaling == "longrope" else 0
    if stack.positions == "rotary" and (len(rotary.short), len(rotary.long)) != (pairs, pairs):
        yield (
            f"{where}.rotary.short and long have {len(rotary.short)} and {len(rotary.long)} numbers, but must have "
            f"{pairs} each: one for each rotated pair of features, only with {where}.rotary.scaling longrope."
        )
    if rotary.low >= rotary.high:
        yield f"{where}.rotary.low is {rotary.low:g}, but must be below {where}.rotary.high {rotary.high:g}."
    if stack.unturned_every and stack.positions != "rotary":
        yield f"{where}.unturned_every is for {where}.positions rotary, and not {stack.positions}; leave it out."
    if stack.score_cap is not None and stack.biased:
        yield f"{where}.score_cap is for scores without biases, and not for {where}.positions {stack.positions}."


def _window_problems(stack: Stack, where: str) -> Iterator[str]:
    """Problems of a stack's windows."""
    alone = "window_base" if stack.window_base is not None else "" if stack.window_scaled else "window_scaled"
    if alone and (stack.positions != "rotary" or stack.window is None):
        yield (
            f"{where}.{alone} is for blocks with rotary positions and a window; set {where}.positions to "
            f"rotary and {where}.window to a number of tokens, or leave it out."
        )
    if stack.global_offset >= max(1, stack.global_every):
        yield (
            f"{where}.global_offset is {stack.global_offset}, but blocks that attend to all tokens come every "
            f"{stack.global_every}; set it below {where}.global_every, from 0 on."
        )


def _norm_problems(stack: Stack, where: str) -> Iterator[str]:
    """Problems of the placement of a stack's norms."""
    if not stack.first_norm and not stack.norm_first:
        yield (
            f"{where}.first_norm false leaves out the norm before the first block's attention, which only blocks "
            f"with {where}.norm_first true have; leave it out, or set that to true."
        )
    if stack.norm_zero_centred and stack.norm != "rms":
        yield f"{where}.norm_zero_centred is for {where}.norm rms, and not {stack.norm}; leave it out."
    if stack.parallel and not stack.norm_first:
        yield (f"{where}.parallel blocks read one norm before both branches; set {where}.norm_first to true.")
    plain = stack.norm_first and stack.first_norm and not stack.parallel
    if stack.sandwich_norms and (not plain or stack.branch_norms):
        yield (
            f"{where}.sandwich_norms adds norms to those before each of attention and MLP; set {where}.norm_first "
            f"and {where}.first_norm to true, {where}.parallel and {where}.branch_norms to false, or leave it out."
        )
    elif stack.branch_norms and not plain:
        yield (
            f"{where}.branch_norms moves norms from before attention and MLP to after; set {where}.norm_first "
            f"and {where}.first_norm to true and {where}.parallel to false, or leave it out."
        )


def _latent_problems(stack: Stack, where: str) -> Iterator[str]:
    """Problems of a stack's latents for keys and values."""
    if stack.latent is None:
        return
    for name, wanted in (
        ("kv_heads", None), ("head_features", None), ("qk_norm", False), ("qkv_bias", False), ("bias", False),
        ("sinks", False), ("window", None), ("norm", "rms"),
    ):  # fmt: skip
        if getattr(stack, name) != wanted:
            remedy = "leave it out" if wanted is None else f"set it to {str(wanted).lower()}"
            yield (
                f"{where}.{name} is {getattr(stack, name)}, but {where}.latent makes keys and values of all heads "
                f"of one latent; {remedy}."
            )
    if stack.positions not in ("rotary", "none"):
        yield (
            f"{where}.positions is {stack.positions}, but with {where}.latent a part of each key is rotated; set it "
            "to rotary, or to none."
        )


def _routed_problems(stack: Stack, where: str) -> Iterator[str]:
    """Problems of experts that are whole blocks."""
    if stack.experts_in == "mlp":
        if any(layer.routed for layer in stack.unequal):
            yield f"{where}.unequal has layers with routed true, which only {where}.experts_in block has; set it."
        return
    if not stack.experts:
        yield f"{where}.experts_in is block, but {where}.experts is 0; set a number of experts, or leave it out."
    for name, wanted in (
        ("router", "given"), ("router_groups", 1), ("shared_experts", 0), ("capacity", None),
        ("sample_capacity", None), ("window", None),
    ):  # fmt: skip
        if getattr(stack, name) != wanted:
            remedy = "leave it out" if name != "router" else "set it to given"
            yield (
                f"{where}.{name} is {getattr(stack, name)}, but with {where}.experts_in block a sample goes as a "
                f"whole through the one block that is given for it; {remedy}."
            )


def _router_problems(stack: Stack, where: str) -> Iterator[str]:
    """Problems of a stack's router."""
    if not stack.experts:
        return
    chosen, groups, taken = stack.experts_per_token, stack.router_groups, stack.groups_per_token
    if chosen > stack.experts:
        yield (
            f"{where}.experts_per_token is {chosen}, but there are only {stack.experts} {where}.experts to send a "
            "token to."
        )
    if not stack.mixture.learns_routes and chosen > 1:
        yield (
            f"{where}.router given sends each token to the one expert that is given, but {where}.experts_per_token "
            f"is {chosen}; set it to 1, or set {where}.router_groups, so that a group is given."
        )
    if stack.mixture.learns_routes and stack.mixture.router_normalised and chosen == 1:
        yield (
            f"{where}.router_normalised makes the weight of a token's only expert 1, from which the router cannot "
            f"learn; leave it out, or set {where}.experts_per_token to 2 or more."
        )
    if stack.expert_dropout and not stack.mixture.learns_routes:
        yield (
            f"{where}.expert_dropout masks visits by their weights, but {where}.router given has no weights; leave "
            "it out."
        )
    if stack.experts % groups:
        yield (
            f"{where}.router_groups is {groups}, but must divide {where}.experts {stack.experts}, because groups "
            "are equal."
        )
    elif taken > groups or (stack.router == "given" and taken > 1):
        yield (
            f"{where}.groups_per_token is {taken}, but a token can have "
            + ("the group that is given; set it to 1." if stack.router == "given" else f"{groups} at most.")
        )
    elif chosen > taken * (stack.experts // groups):
        yield (
            f"{where}.experts_per_token is {chosen}, but {where}.groups_per_token {taken} has only "
            f"{taken * (stack.experts // groups)} experts; raise it, or lower {where}.router_groups."
        )


def _label_problems(stack: Stack, where: str) -> Iterator[str]:
    """Every reason why these labels have no experts."""
    if stack.labels and not stack.experts:
        yield f"{where}.labels is {stack.labels}, but the stack has no experts to count the visits of; leave it out."
    if stack.expert_of and (stack.router != "given" or len(stack.expert_of) != stack.labels):
        yield (
            f"{where}.expert_of names an expert for {len(stack.expert_of)} labels, but {where}.labels is "
            f"{stack.labels} and {where}.router {stack.router}; name one for each label of a router that is given."
        )
    if stack.experts and stack.router == "given":
        most = max(stack.expert_of, default=stack.labels - 1)
        if most >= (stack.router_groups if stack.mixture.learns_routes else stack.experts):
            yield (
                f"{where}.labels need expert {most}, but there are {stack.experts} {where}.experts, from 0 "
                f"on; use more, or let labels share experts with {where}.expert_of."
                if not stack.mixture.learns_routes
                else f"{where}.labels need group {most}, but there are {stack.router_groups} {where}.router_groups, "
                f"from 0 on; use more, or let labels share groups with {where}.expert_of."
            )


def _unequal_problems(stack: Stack, where: str) -> Iterator[str]:
    """Problems of the sizes that a stack sets for each layer."""
    if not stack.unequal:
        return
    where, each = f"{where}.unequal", max(1, stack.experts)
    for routed, group in groupby(stack.unequal, lambda layer: layer.routed):
        layers = tuple(group)
        alike = all(len(set(layers[i : i + each])) == 1 for i in range(0, len(layers), each))
        if routed and (len(layers) % each or not alike):
            yield (
                f"{where} has {len(layers)} layers with routed true in a row, but for each block there must be "
                f"{each} alike, one for each expert; list them so."
            )
    routed_layers = sum(layer.routed for layer in stack.unequal)
    depth = len(stack.unequal) - routed_layers + routed_layers // each
    if depth != stack.depth:
        yield f"{where} lists {depth} layers, but the depth is {stack.depth}; make them equal."
    for number, layer in enumerate(stack.unequal):
        if layer.heads % layer.kv:
            yield (
                f"{where}[{number}].kv is {layer.kv}, but must divide its heads, {layer.heads}, because each "
                "serves the same number of query heads."
            )
        if layer.mixture and not stack.experts:
            yield f"{where}[{number}].mixture is true, but the stack has no experts; set experts, or leave it out."
        if layer.window not in (0, stack.window):
            yield f"{where}[{number}].window is {layer.window}, but must be 0 or the stack's window, {stack.window}."
        if stack.biased and layer.heads != stack.heads:
            yield (
                f"{where}[{number}].heads is {layer.heads}, but positions {stack.positions} have a bias for each of "
                f"{stack.heads} heads, which all blocks share; keep {stack.heads}."
            )
