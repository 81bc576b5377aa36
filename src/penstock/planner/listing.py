"""Writing down operators as they run, and with each the operators of its gradients as autograd runs them.

Eager code runs each pointwise operator on its own; compiled or hand-fused code (`plan.compile`) runs neighbours as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

from penstock.config.activations import ACTIVATIONS, UNGATED, Mlp
from penstock.config.formats import BYTES, PRODUCTS
from penstock.config.fused import FUSED_FORM
from penstock.config.layer import NormKind
from penstock.config.machine import ProductForm
from penstock.kernels.choices import padded_entries
from penstock.planner.operators import COLLECTIVE, BlockKind, Module, Op, OpKind, Part, Place
from penstock.planner.terms import OpTerms

RMS_KERNELS = 8
"""Operators from which torch composes an RMSNorm if it has no kernel: on a CPU, and before torch 2.9 on a GPU."""

ROUNDING_BYTES = 36.0
"""Bytes that single kernels move per element rounded to int8, besides reading it and writing the result: cast to fp32
(4), magnitude (8), maximum (4), scaling (8), rounding (8), and the last read (4)."""


class Quantizer(NamedTuple):
    """How Transformer Engine casts the rows of each expert to fp8 and also writes their transposed copy."""

    launches: int
    reads: int
    together: bool = False
    """Whether the rows of all experts are one launch (`multi_tensor_quantize_impl` of its `cast.cpp`)."""


QUANTIZERS = {
    "delayed": Quantizer(1, 1, together=True), "current": Quantizer(4, 2), "blockwise": Quantizer(1, 1),
}  # fmt: skip
"""Quantizers by how they find scales. For a current scale, one kernel each clears the maximum, finds it, makes a scale
of it and uses that (its `current_scaling.cu`). Weights are cast once a step, which is not counted."""
SCALED_EVERY = 128
"""Terms of a sum with a scale of their own, in blocks (DeepSeek-AI, "DeepSeek-V3", 2024, section 3.3.2)."""
Bytes = tuple[float, float]
"""Bytes that are read and written for each element."""


class Lister:
    """The operators of one part, in the order of its forward pass."""

    def __init__(self, terms: OpTerms) -> None:
        self.terms = terms
        self._module: Module = ""
        self._padded = False
        self._forward: list[Op] = []
        self._gradients: list[tuple[Op, ...]] = []

    @contextmanager
    def inside(self, module: Module) -> Iterator[None]:
        """Mark the operators that are listed inside as a part of `module`."""
        outer, self._module = self._module, module
        yield
        self._module = outer

    @contextmanager
    def words(self, columns: int) -> Iterator[None]:
        """Mark products inside over a vocabulary of `columns` entries as padded where Penstock pads them."""
        t = self.terms
        self._padded = t.software.loss == "penstock" and padded_entries(t.device, columns) != columns
        yield
        self._padded = False

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Let products inside compute in fp32 at every precision."""
        plain = self.terms._replace(product=4.0, casts=False, products="plain", exact=True)
        outer, self.terms = self.terms, plain
        yield
        self.terms = outer

    def _placed(self, op: Op) -> Op:
        op = op._replace(padded=True) if self._padded and op.kind == "gemm" else op
        return op if op.kind in COLLECTIVE or op.module else op._replace(module=self._module)

    def part(self, place: Place, block: BlockKind | None = None, *, entering: float = 0.0) -> Part:
        """The listed part, with the sums over its operators."""
        experts = sum(op.weights for op in self._forward if op.module == "experts")
        return Part(
            place=place, count=block.count if block else 1, forward=tuple(self._forward),
            backward=tuple(op for gradients in reversed(self._gradients) for op in gradients),
            entering=entering, parameters=sum(op.weights for op in self._forward) - experts, experts=experts,
            tensors=sum(op.tensors for op in self._forward), block=block,
        )  # fmt: skip

    def add(self, op: Op, *gradients: Op) -> None:
        """A forward operator and its gradients' operators, the last of which frees what the forward operator kept."""
        self._forward.append(self._placed(op))
        if gradients and op.kept:
            gradients = (*gradients[:-1], gradients[-1]._replace(kept=op.kept))
        self._gradients.append(tuple(map(self._placed, gradients)))

    def behind(self, *gradients: Op) -> None:
        """Operators of the backward pass alone; they run before those of everything listed so far."""
        self._gradients.append(tuple(map(self._placed, gradients)))

    def gemm(
        self, name: str, rows: float, n: int, k: int, *, batch: int = 1, bias: bool = False, first: bool = False,
        tied: bool = False, kept: float | None = None, group: str = "inputs",
        narrow: bool = True, kind: Literal["gemm", "conv"] = "gemm", source: float | None = None,
        pieces: tuple[int, ...] = (), beside: float = 0.0, was_cast: bool = False, sums_bias: bool = True,
    ) -> None:  # fmt: skip
        """`batch` products of rows (rows, k) with weights (k, n), and both products of the output's gradient.

        `first`: the rows need no gradient. `source`: number of input elements, if a convolution reads each several
        times. `tied`: the weights are another operator's. `pieces`: as in `Op`. Without `narrow` the product is not in
        the 8 bits of the Plan's `products`; `beside` is bytes of inputs kept in addition to those in 8 bits.
        `was_cast`: an earlier product of the same weights has cast them. Without `sums_bias`, another operator sums the
        bias gradient.
        """
        t = self.terms
        by_expert = t.software.experts_apart and self._module == "experts"
        narrow = narrow or (t.heads and self._module == "head")
        c, row = t.product, PRODUCTS[t.products if narrow else "plain"]
        one_pass = t.one_pass and row.weights is not None
        integers, eight = row.weights == "int8" and not one_pass, bool(row.passes) and not one_pass
        ahead_in_8 = one_pass or (eight and "forward" in row.passes)
        direct = integers or (t.casts and row.scales == "tensorwise")  # gradients in fp32 without a cast
        sizes = [1.0 if eight and one in row.passes else c for one in get_args(ProductForm)[:3]]
        size, into_size, learn_size = sizes
        stored = BYTES[row.weights] if one_pass and row.weights else t.weight
        inputs = batch * (rows * k if source is None else source)
        outputs, weights, biases = batch * rows * n, batch * n * k, batch * n * bias
        if kept is None:
            each, row_scales = t.kept if narrow else c, 4.0 * batch * rows * (integers and not row.clips)
            kept = inputs * each + beside * (each != c) + row_scales
            # Sequence parallelism keeps the device's own rows and gathers the rest again.
            kept /= t.spread if group == "inputs" else 1
        if integers:
            self._round(name, inputs, weights, outputs, row.passes)
        elif eight:
            self._quantize(name, inputs, weights, outputs, batch)
        if t.casts and not (integers or eight or was_cast):
            self._cast_weights(name, weights, biases, kept=not (first and kind == "gemm"))
        alike = Op(
            name, kind, batch=batch, exact=t.exact, launches=batch if t.loops or by_expert else 1,
            linear=name, beside=by_expert, scaled_every=SCALED_EVERY * (eight and t.software.scaling == "blockwise"),
        )  # fmt: skip
        ahead = alike._replace(
            m=rows, n=n, k=k, read=inputs * size + weights * (stored or size) + biases * c, kept=kept, group=group,
            written=outputs * (4.0 if integers and ahead_in_8 else c), weights=weights * (not tied) + biases,
            tensors=(not tied) + bool(biases), narrow=ahead_in_8, pieces=pieces,
        )  # fmt: skip
        into = alike._replace(
            name=f"{name}.input", forward=False, m=rows, n=k, k=n, read=(outputs + weights) * into_size,
            written=inputs * (4.0 if integers else c), narrow="input" in row.passes,
        )  # fmt: skip
        learn = alike._replace(
            name=f"{name}.weight", forward=False, m=n, n=k, k=rows, read=(outputs + inputs) * learn_size,
            written=weights * (4.0 if direct and "weight" in row.passes else c), weights=weights,
            narrow="weight" in row.passes,
        )  # fmt: skip
        summing = self._bias_gradient(name, outputs, biases, sums=sums_bias)
        self.add(ahead, *[into] * (not first), learn, *summing)

    def _cast_weights(self, name: str, weights: float, biases: float, *, kept: bool) -> None:
        """Autocast's cast of a linear layer's parameters, and that of their gradients; the backward pass needs the cast
        weights if they are `kept`. A table that is also an embedding's is cast here alone."""
        cast, launches = weights + biases, 1 + bool(biases)
        ahead = Op(
            "cast.weights", "copy", read=4.0 * cast, written=2.0 * cast, launches=launches, linear=name
        )
        back = ahead._replace(name="cast.gradients", forward=False, read=2.0 * cast, written=4.0 * cast)
        self.add(ahead._replace(kept=2.0 * weights * kept, group="cast_weights"), back)

    def _bias_gradient(self, name: str, outputs: float, biases: int, *, sums: bool) -> Iterator[Op]:
        """The sum of the outputs' gradients over rows, for a layer with biases. Unless it `sums`, another
        operator does."""
        if biases:
            yield Op(
                f"{name}.bias", "reduce", False, read=outputs * self.terms.product * sums,
                written=biases * self.terms.product, weights=biases, launches=int(sums), linear=name,
            )  # fmt: skip

    def _round(
        self, name: str, inputs: float, weights: float, outputs: float, passes: tuple[ProductForm, ...]
    ) -> None:
        """Operators that int8 adds to each product. Forward: inputs are rounded; where outputs are in int8, weights are
        rounded too and sums are scaled. Backward: weights are rounded again, and outputs' gradients once for each
        product in int8, else scaled. Fused operators read twice, for the largest element and to round; a CPU's single
        operators work on pieces that stay in its cache."""
        t = self.terms
        c, weight = t.product, 4.0 if t.casts else t.product
        times = sum(one in passes for one in ("input", "weight"))
        gradients = outputs * times
        reads, writes = (2.0 if t.fused else 1.0), 1.0 + ROUNDING_BYTES * (not t.fused and not t.host)
        forward = "forward" in passes
        ahead, behind = inputs + (weights if forward and not t.serving else 0.0), gradients + weights
        self.add(
            Op(f"{name}.quantize", "quantize", read=reads * (inputs * c + (ahead - inputs) * weight),
               written=writes * ahead, elements=0.0 if t.fused else ahead),
            Op(f"{name}.quantize", "quantize", False, read=reads * (gradients * c + weights * weight),
               written=writes * behind, elements=0.0 if t.fused else behind, launches=max(times, 1)),
        )  # fmt: skip
        own = 0.0 if "weight" in passes else (outputs + inputs) * (2 * c)
        moved = 4.0 + c if t.fused else 12.0 + 8.0 + c
        self.add(
            Op(f"{name}.scale", "copy", read=forward * outputs * moved / 2, written=forward * outputs * moved / 2,
               launches=int(forward)),
            Op(f"{name}.scale", "copy", False, read=(inputs * moved + weights * 8.0 + own) / 2,
               written=(inputs * moved + weights * 8.0 + own) / 2, launches=2),
        )  # fmt: skip

    def _quantize(self, name: str, inputs: float, weights: float, outputs: float, batch: int) -> None:
        """Operators that fp8 adds to each product. Inputs (in the backward pass the outputs' gradients) are read for
        their largest element, then read again and written as one byte per element. Single operators do the same with
        weights, in their own type and for each forward pass, unless they come in fp8, and keep the copy; in the
        backward pass they transpose weights, inputs and gradients, because the summed dimension must be contiguous.
        Fused operators cast weights when they are updated, and also write transposed copies."""
        t = self.terms
        if t.software.scaling:
            by = QUANTIZERS[t.software.scaling]
            one = Op(f"{name}.quantize", "quantize", launches=by.launches * (1 if by.together else batch))
            self.add(*(
                one._replace(read=by.reads * t.product * size, written=2 * size, forward=forward)
                for size, forward in ((inputs, True), (outputs, False))
            ))  # fmt: skip
            return
        c, weight = t.product, 4.0 if t.casts else t.product
        if PRODUCTS[t.products].scales == "rowwise":
            # Each factor is cast for each product, along the summed dimension; a served model's weights only once. A
            # factor that is contiguous along the sum is read once, otherwise twice. The products' gradients are in
            # half precision.
            cast, across = weights * (not t.serving), outputs + inputs
            gradient = Op(
                "cast.gradients", "copy", False, read=2.0 * weights, written=4.0 * weights, linear=name
            )
            self.add(
                Op(f"{name}.quantize", "quantize", read=c * inputs + weight * cast, written=inputs + cast),
                Op(f"{name}.quantize", "quantize", False, read=c * (outputs + 2 * across) + 2 * weight * weights,
                   written=outputs + across + weights, launches=2),
                *[gradient] * t.casts,
            )  # fmt: skip
            return
        cast = weights * (not (t.fused or t.rounded))
        turned = 0.0 if t.fused else weights + inputs + outputs
        self.add(
            Op(f"{name}.quantize", "quantize", read=2 * (c * inputs + weight * cast), written=inputs + cast,
               kept=cast, group="cast_weights"),
            Op(f"{name}.quantize", "quantize", False, read=2 * c * outputs + turned, written=outputs + turned,
               launches=1 if t.fused else 2),
        )  # fmt: skip

    def move(
        self, name: str, size: float, ahead: Bytes, behind: Bytes | None = None, *, kind: OpKind = "pointwise",
        kept: float = 0.0, group: str = "", weights: int = 0, tensors: int = 0, launches: int = 1, row: int = 0,
        scores: bool = False, function: str = "", launches_back: int | None = None,
    ) -> None:  # fmt: skip
        """An operator that only moves `size` elements, and the one that moves their gradients: the same bytes, unless
        `behind` states others; (0, 0) means none. `kept` is the bytes kept in total, `row` the length of a softmax's
        rows, and `function` that of an activation."""
        one = Op(
            name, kind, row=row, read=size * ahead[0], written=size * ahead[1], elements=size, kept=kept, group=group,
            weights=weights, tensors=tensors, launches=launches, scores=scores, function=function,
        )  # fmt: skip
        read, written = behind or ahead
        if not read and not written:
            self.add(one)
            return
        back = Op(
            name, kind, False, read=size * read, written=size * written, elements=size, row=row, function=function,
            launches=launches if launches_back is None else launches_back,
        )  # fmt: skip
        learn = Op(f"{name}.weight", "reduce", False, launches=0, weights=weights)
        self.add(one, back, *[learn] * bool(weights))

    def dropout(
        self, name: str, size: float, each: float, group: str = "masks", *, merged: bool = False, kept: float = 0.0,
        torchs: bool = False, scores: bool = False,
    ) -> None:  # fmt: skip
        """Dropout of `size` elements of `each` bytes; for each it keeps `kept` bytes and a mask of one byte, or of
        `each` bytes in torch's own dropout on a CPU (`torchs`). If `merged` with the operator that reads its result, it
        writes the mask alone. Served models have no dropout."""
        if self.terms.serving:
            return
        torchs = torchs and self.terms.host
        mask = each if torchs else 1.0
        self.move(
            name, size, (each, mask if merged else each + mask), (each + mask, each),
            kind="torch_dropout" if torchs else "dropout",
            kept=size * (kept + mask), group=group, scores=scores,
        )  # fmt: skip

    def table(
        self, ahead: Op, read: float, written: float, *, cleared: float = 0.0, tables: Sequence[int] = ()
    ) -> None:
        """An operator that reads one or several tables of learned vectors (of these sizes), and those that clear and
        add up their gradients."""
        learn = Op(f"{ahead.name}.weight", "reduce", False, launches=0)
        sizes = tables or (ahead.weights,)
        with self.inside("table"):
            self.add(
                ahead, Op(ahead.name, ahead.kind, False, read=read, written=written),
                *[learn._replace(weights=size) for size in reversed(sizes[1:])],
                learn._replace(written=cleared, weights=sizes[0]),
            )  # fmt: skip

    def activate(
        self, name: str, size: float, mlp: Mlp, ahead: Bytes, behind: Bytes | None = None, *, kept: float = 0.0,
        group: str = "", fused: bool = False,
    ) -> None:  # fmt: skip
        """An activation of `size` elements, of the first half where `mlp` is gated. If `fused`, it computes like the
        kernels of `plan.fuse`. So do compiled code, and inference on a CPU for GELU's tanh form, without a tanh."""
        t, function, c = self.terms, UNGATED.get(mlp, mlp), ahead[0]
        row = ACTIVATIONS[function]
        if row.passes and not (fused or t.fused):
            for one in row.passes:
                read, written = (c * count for count in one.forward)
                self.move(
                    f"{name}.{one.name}" if one.name else name, size, (read, written),
                    (c * one.backward[0], c * one.backward[1]), kind="activation" if one.function else "pointwise",
                    kept=kept if one.function else size * c * one.keeps, group=group, launches=one.launches,
                    function=one.function,
                )  # fmt: skip
            return
        rated = row.merged or function
        fused = fused or ((t.fused or t.serving) and t.host and rated == "gelu_tanh")
        self.move(
            name, size, ahead, behind, kind="activation", kept=kept, group=group,
            function=f"{FUSED_FORM}{rated}" if fused else rated,
        )  # fmt: skip

    def modulate(self, name: str, size: float, *, launches: int = 1) -> None:
        """A product of `size` elements with a factor per sample and feature; it keeps the elements for its gradient."""
        e = self.terms.stream
        launches = 1 if self.terms.fused else launches
        self.move(
            name, size, (launches * e, launches * e), ((1 + launches) * e, e), kept=size * e, group="norms",
            launches=launches,
        )  # fmt: skip

    def norm(
        self, name: str, rows: float, width: int, kind: NormKind, *, cast: bool = True, modulated: bool = False,
    ) -> None:  # fmt: skip
        """A norm over rows of `width` features, and under autocast the cast of its output to the type of products. A
        modulated norm has no weights; its output is shifted and scaled before the cast."""
        t, rms = self.terms, kind.kind == "rms"
        tensors = 0 if modulated else kind.tensors
        e, c, size = t.stream, t.product, rows * width
        # Compiled, the single kernel of a norm casts as it writes.
        autocast = e == 4 and c == 2 and (t.software.casts_norms or not (t.fused and cast))
        out, launches = e if autocast else c, 1 + (kind.zero_centred and not t.fused)
        # An eager norm of half inputs that computes in fp32 keeps its copy of them.
        copies = t.host and not t.fused and not rms and t.norms > e
        read, statistic = (t.norms, t.norms) if copies else (e, t.statistic)
        kept, ahead, behind = size * read + (1 if rms else 2) * rows * statistic, (e, out), (e + out, e)
        if rms and (t.host or t.software.norms_apart) and not t.fused:
            # torch computes in fp32, and keeps its result as well as its input.
            kept += size * 4 + (size * (4 - e) if t.host else size * c)
            ahead, behind, launches = (8 * e, e), (12 * e, 2 * e), RMS_KERNELS
        with self.inside("norm"):
            self.move(
                name, size, ahead, behind, kind="norm", kept=kept, group="norms", weights=tensors * width,
                tensors=tensors, launches=launches,
            )  # fmt: skip
            if modulated:
                self.modulate(f"{name}.modulate", size, launches=2)
            if autocast and cast:
                self.move(f"{name}.cast", size, (4, 2), (2, 4), kind="copy")

    def add_norm(
        self, name: str, rows: float, width: int, kind: NormKind, *, branch: float, dropout: bool, both: bool
    ) -> None:
        """A branch of `branch` bytes an element added to the residual stream, and the norm of the sum, as one operator
        (`penstock.kernels.residual_norm`). With `both` the sum is read too; otherwise its norm is the stream. A GPU
        regenerates the dropout mask instead of keeping it."""
        t, e, size = self.terms, self.terms.stream, rows * width
        out = t.product if both else e
        if dropout and t.host:
            self.move(f"{name}.mask", size, (0.0, 1.0), (0.0, 0.0), kind="dropout", kept=size, group="masks")
        mask, own_gradient = float(dropout and t.host), dropout or branch != e
        with self.inside("norm"):
            behind = out + e * (1 + both) + mask, e + branch * own_gradient
            self.move(
                name, size, (e + branch + mask, e + out), behind, kind="norm", group="norms", tensors=kind.tensors,
                kept=size * e + 8.0 * rows, weights=kind.tensors * width,
            )  # fmt: skip
