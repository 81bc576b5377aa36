"""The gradient of a token embedding in compiled programs: only the rows of the batch's tokens are touched.

If an embedding table (V, D) also serves as the output layer, its gradient is the sum of the output layer's, which is
dense, and the embedding's, which has at most T nonzero rows, one per token of the batch. torch writes the second as V
rows of zeros in fp32, adds T rows to it, casts all, and adds all to the first: it reads and writes 3 to 4 times V·D
elements, although only T·D of them matter. `AddTouchedRows` rewrites the graph between autograd and code generation
into: sum the rows of equal tokens in fp32, (T, D); read the rows of these tokens from the dense gradient; write their
sums back, in place. If a half-precision table is not the output layer, the sums are written into zeros of its own
dtype, so that no fp32 table is written, read and cast.

Let i be the positions of the batch, t_i their tokens and g_i their gradients. Every token has one representative
position r(i) with t_r(i) = t_i: each position writes its index into an array of V integers at its token, and the index
that remains there is the representative. Then s_r = Σ_{i: r(i) = r} g_i, and row t_i of the gradient becomes w_{t_i} +
s_{r(i)}: all positions of a token write the same value.
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
        """The version of this pass, part of the key of cached programs; change it with the code."""
        return "penstock.AddTouchedRows.2"


def _embedding_gradient(node: Any) -> Any:
    """The operator that adds rows to zeros (V, D), if `node` is it or its cast and nothing else reads it."""
    if isinstance(node, Node) and node.target is prims.convert_element_type.default:
        node = node.args[0]
    if not isinstance(node, Node) or node.target is not aten._unsafe_masked_index_put_accumulate.default:
        return None
    arguments: Any = node.args
    zeros, _, indices, _ = arguments
    cleared = isinstance(zeros, Node) and zeros.target is aten.full.default and zeros.args[1] == 0
    single_use = len(node.users) == 1 and len(indices) == 1
    two = node.meta["val"].ndim == 2
    return node if cleared and single_use and two and node.meta["val"].device.type == "cpu" else None


def _is_dense(node: Any, total: Any) -> bool:
    """Whether `node` is a gradient with the shape and dtype of the sum."""
    value, wanted = node.meta["val"] if isinstance(node, Node) else None, total.meta["val"]
    return value is not None and (value.shape, value.dtype) == (wanted.shape, wanted.dtype)


def _with_rows(graph: Graph, put: Any, dtype: torch.dtype, dense: Any = None) -> Any:
    """Add the rows of `put` to `dense` (V, D), or to zeros of type `dtype` if there is none. New nodes get their
    metadata by running the operators on fake tensors."""
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
