"""The gradient of a table that embeds tokens, in compiled programs: only rows of the batch's tokens are touched.

The gradient of a table, (V, D), that also makes logits is the sum of theirs, which is dense, and of the embedding's,
which has at most T rows that are not zero, one per token of the batch. torch writes the second as V rows of zeros in
fp32, adds T of them, casts all, and adds all to the first: 3 to 4 times V·D elements are read and written for T·D that
count.
`AddTouchedRows` rewrites the graph between autograd and code generation into: sum the rows of equal tokens in fp32,
(T, D); read the rows of these tokens from the dense gradient; write their sums back, in place. Where a half table
makes no logits, the sums are written into zeros of its own type, so that no table in fp32 is written, read and cast.

Let i be the positions of the batch, t_i their tokens and g_i their gradients. Every token has one representative
position r(i) with t_r(i) = t_i: the one that an array of V integers keeps when each position writes its own number at
its token. Then s_r = Σ_{i: r(i) = r} g_i, and row t_i of the gradient becomes w_{t_i} + s_{r(i)}: all positions of a
token write the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node
from torch.fx.node import map_arg

aten, prims = torch.ops.aten, torch.ops.prims


class AddTouchedRows(CustomGraphPass):
    """A pass over Inductor's graph for CPUs, for `options={"post_grad_custom_pre_pass": AddTouchedRows()}`."""

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
            if node.kwargs:
                continue
            for dense, sparse in (node.args, node.args[::-1]):
                put = _embedding_gradient(sparse)
                if put is not None and len(sparse.users) == 1 and _is_dense(dense, node):
                    with graph.inserting_before(node):
                        node.replace_all_uses_with(_with_rows(graph, put, dense.meta["val"].dtype, dense))
                    graph.erase_node(node)
                    break
        for node in list(graph.find_nodes(op="call_function", target=prims.convert_element_type.default)):
            put, dtype = _embedding_gradient(node), node.meta["val"].dtype
            if put is not None and dtype.itemsize < put.meta["val"].dtype.itemsize:
                with graph.inserting_before(node):
                    node.replace_all_uses_with(_with_rows(graph, put, dtype))
                graph.erase_node(node)
        graph.eliminate_dead_code()

    def uuid(self) -> str:
        """The version of this pass, by which compiled programs are cached: to be changed with its code."""
        return "penstock.AddTouchedRows.2"


def _embedding_gradient(node: Any) -> Any:
    """The sum of rows into zeros (V, D) that `node` casts or is, if nothing else reads it."""
    if isinstance(node, Node) and node.target is prims.convert_element_type.default:
        node = node.args[0]
    if not isinstance(node, Node) or node.target is not aten._unsafe_masked_index_put_accumulate.default:
        return None
    arguments: Any = node.args
    zeros, _, indices, _ = arguments
    cleared = isinstance(zeros, Node) and zeros.target is aten.full.default and zeros.args[1] == 0
    alone = len(node.users) == 1 and len(indices) == 1
    two = node.meta["val"].ndim == 2
    return node if cleared and alone and two and node.meta["val"].device.type == "cpu" else None


def _is_dense(node: Any, total: Any) -> bool:
    """Whether `node` is a gradient of the shape and type of the sum."""
    value = node.meta["val"] if isinstance(node, Node) else None
    return (
        value is not None
        and value.shape == total.meta["val"].shape
        and value.dtype == total.meta["val"].dtype
    )


def _with_rows(graph: Graph, put: Any, dtype: torch.dtype, dense: Any = None) -> Any:
    """`dense` (V, D), of a type, or zeros, with the rows that `put` would add to zeros. Nodes get the values that fake
    tensors give them."""
    _, mask, (index,), values = put.args

    def call(target: Any, *args: Any, **kwargs: Any) -> Any:
        node = graph.call_function(target, args, kwargs)

        def fake(value: Any) -> Any:
            return map_arg(value, lambda n: n.meta["val"])

        with put.meta["val"].fake_mode:
            node.meta["val"] = target(*fake(args), **fake(kwargs))
        return node

    rows, columns = put.meta["val"].shape
    wide = values.meta["val"].dtype
    count = index.meta["val"].numel()
    plain = {"device": torch.device("cpu"), "pin_memory": False}
    tokens = call(aten.reshape.default, index, [count])
    gradients = call(aten.reshape.default, values, [count, columns])
    if mask is not None:
        zero = call(aten.full.default, [], 0.0, dtype=wide, layout=torch.strided, **plain)
        gradients = call(aten.reshape.default, call(aten.where.self, mask, values, zero), [count, columns])
    positions = call(aten.arange.start_step, 0, count, 1, dtype=torch.int64, layout=torch.strided, **plain)
    nobody = call(aten.full.default, [rows], 0, dtype=torch.int64, layout=torch.strided, **plain)
    keeper = call(aten.index.Tensor, call(aten.index_put.default, nobody, [tokens], positions), [tokens])
    empty = call(aten.full.default, [count, columns], 0.0, dtype=wide, layout=torch.strided, **plain)
    sums = call(aten.index_put.default, empty, [keeper], gradients, True)
    total = call(aten.index.Tensor, sums, [keeper])
    if dense is None:
        dense = call(aten.full.default, [rows, columns], 0.0, dtype=dtype, layout=torch.strided, **plain)
    else:
        own = call(prims.convert_element_type.default, call(aten.index.Tensor, dense, [tokens]), wide)
        total = call(aten.add.Tensor, own, total)
    return call(
        aten.index_put.default, dense, [tokens], call(prims.convert_element_type.default, total, dtype)
    )
