"""The graph of a model: its inputs, the runs of layers over them, and its heads.

Every configuration of a model has a `graph`. Code that builds, splits, predicts, serves or exports a model iterates
over these lists and does not depend on the model's family.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

from penstock.config.stack import Stack

H = TypeVar("H")
Stem = Literal["patchify", "conv"]
Before = Literal["norm", "tanh", "transform", "none"]
ImagePool = Literal["first", "mean", "both", "attention"]
Init = Literal["normal", "scaled", "fan_in", "xavier"]
NoiseKind = Literal["cosine", "linear", "flow"]
Target = Literal["v", "eps", "x0"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInput:
    """An input of token ids, (B, N), which index the rows of an embedding table."""

    name: str = "tokens"
    """The model's argument."""
    vocabulary: int
    """Rows of the table."""
    length: int
    """Tokens of a sample."""
    table: str = "tokens"
    """Name of the module with the table; inputs with the same name share it."""
    segments: int = 0
    """Rows of a second table, for kinds of segments; 0: there is none."""
    scaled: bool = False
    """Whether vectors are multiplied by √width (Vaswani et al., NeurIPS 2017, section 3.4)."""
    ordered: bool = False
    """Whether its tokens attend to no later ones, in every run that computes them."""
    prefix: float = 0.0
    """Share of training samples whose first tokens attend to each other nevertheless; the argument `prefixes` has their
    numbers."""
    share: float = 1.0
    """Average number of this input's samples per sample of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchInput:
    """An input of images, (B, C, S, S), whose patches are mapped to vectors."""

    name: str = "images"
    image_size: int
    """Pixels of a side."""
    patch_size: int
    channels: int
    stem: Stem = "patchify"
    """`patchify`: one linear map per patch. `conv`: 3×3 stride-2 convolutions (Xiao et al., NeurIPS 2021)."""
    class_token: bool = False
    """Whether a learned vector comes before the patches."""
    distil_token: bool = False
    """Whether a second learned vector follows, whose head learns from a teacher."""
    registers: int = 0
    """Number of learned vectors without positions that follow these (Darcet et al., ICLR 2024)."""
    bias: bool = True
    """Whether the linear map has a bias."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, S, S), of one image."""
        return self.channels, self.image_size, self.image_size

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def learned_tokens(self) -> int:
        """Number of a sample's tokens before its patches."""
        return self.class_token + self.distil_token + self.registers

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.patches + self.learned_tokens

    def stem_widths(self, width: int) -> tuple[int, ...]:
        """Output channels of each stride-2 convolution of the `conv` stem. They double up to the model's width."""
        halvings = self.patch_size.bit_length() - 1
        return tuple(max(8, width >> (halvings - 1 - i)) for i in range(halvings))


Input = TokenInput | PatchInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A vector of each sample, (B, D), that modulates the norms of runs and heads: the sum of the embeddings of its
    time in [0, 1], (B,), and of its class, (B,) (Peebles & Xie, ICCV 2023, "DiT", section 3.2, adaLN-Zero)."""

    name: str = "condition"
    """Name of the module that computes it."""
    frequencies: int = 256
    """Number of sines and cosines that embed a time."""
    classes: int = 0
    """Number of classes; a sample whose class is this number has none. 0: no sample has a class."""
    dropout: float = 0.0
    """Share of training samples whose class, or text, is left out."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A stack of layers over the tokens of an input, or over the output of another run."""

    name: str
    """The module that holds it."""
    stack: Stack
    reads: str
    """The input, or the earlier run, that it reads."""
    more_inputs: tuple[str, ...] = ()
    """Further inputs, whose samples follow those of the input that it reads, each with its own mask."""
    input: str = ""
    """The input whose samples it computes, if it reads a run over several inputs."""
    memories: tuple[str, ...] = ()
    """Earlier runs whose concatenated outputs its cross attention reads: those that were computed, or for each sample
    the one that the argument `memory_index` chooses. Narrower outputs are padded with zeros."""
    causal: bool = False
    """Whether a token attends only to itself and earlier tokens."""
    rows: int = 0
    """Rows of its table of learned positions."""
    max_tokens: int = 0
    """Maximum number of tokens of a sample."""
    embedding_norm: bool = False
    """Whether a norm precedes its first layer."""
    modulated: bool = False
    """Whether the condition of a sample shifts, scales and gates its blocks."""
    last_norm: bool = True
    """Whether a pre-norm run ends with a norm; otherwise the head has one."""
    setting: str = "model"
    """Name of the configuration's setting that holds its stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WordHead:
    """A head: logits of each token over a vocabulary, (B, N, V)."""

    name: str = "head"
    """The module that holds its last linear."""
    run: str
    """The run that it reads."""
    vocabulary: int
    tied: str = ""
    """Name of the table of tokens that it uses as its weight; empty for a weight of its own."""
    bias: bool = False
    scaled: bool = False
    """Whether its inputs are divided by √width."""
    transform: bool = False
    """Whether a dense layer, its activation and a norm come before it (BERT)."""
    cap: float = 0.0
    """The cap c of logits z, which become c·tanh(z / c); 0: no cap."""
    target_share: float = 1.0
    """Share of its run's tokens that have a target in the loss, unless its task sets it for all heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassHead:
    """A head: logits of each sample over classes, (B, classes)."""

    name: str = "head"
    run: str
    classes: int
    pool: ImagePool = "first"
    """The vector of a sample: the first token, the mean over tokens, or `both` concatenated; or the attention of a
    learned query to all tokens, followed by a perceptron (`attention`; Zhai et al., CVPR 2022, "Scaling Vision
    Transformers", section 3.2)."""
    skipped: int = 0
    """Number of first tokens that are left out of the mean."""
    before: Before = "norm"
    """The layers before the last linear: a norm; a dense layer and tanh; a dense layer, its activation and a norm; or
    none."""
    norm_first: bool = False
    """Whether the norm is applied to all tokens before the mean."""
    dropout: float = 0.0
    distilled: bool = False
    """Whether a second linear reads the second token: logits are the mean of both, and only the second's are compared
    with the teacher (Touvron et al., ICML 2021, "DeiT", section 4)."""

    @property
    def vectors(self) -> int:
        """Number of token-sized vectors that are concatenated as a sample's."""
        return 1 + (self.pool == "both")

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the modules of its last linears: the vector's, then the distilled one."""
        return (self.name, part_of(self, "distil_head")) if self.distilled else (self.name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureHead:
    """A head without weights: each token's features, (B, N, D)."""

    name: str = "features"
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelHead:
    """A head: an image for each sample, (B, C, S, S), shaped like an input of images; each token yields a patch. For a
    noisy image it predicts the target that `penstock.tasks.noise` describes."""

    name: str = "head"
    run: str
    predicts: Target = "v"
    schedule: NoiseKind = "cosine"
    min_snr: float | None = None
    """γ of the weights of the loss; None: all samples have the same weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorHead:
    """A head: a vector for each sample, to be compared with those of another such head. Their dot products are logits.
    Vectors have length 1, (B, features), times the learned factor if there is one. With an offset they have one more
    feature: the learned offset in the head with the factor, and 1 in the other head.
    """

    name: str
    run: str
    features: int
    pool: Literal["first", "last", "mean"] = "mean"
    """The token that becomes a sample's vector: the first, the last that is not padding, or the mean over tokens."""
    scale: float | None = None
    """Initial value of the learned factor, an inverse temperature; none: there is no factor."""
    offset: float | None = None
    """Initial value of the learned offset; none: there is no offset."""


Head = WordHead | ClassHead | FeatureHead | PixelHead | VectorHead


def part_of(head: Head, part: str) -> str:
    """The name of a part before a head's last linear."""
    return part if head.name == "head" else f"{head.name}_{part}"


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The parts of a model. Runs are listed in the order in which they are computed; each reads inputs or earlier
    runs."""

    inputs: tuple[Input, ...]
    runs: tuple[Run, ...]
    heads: tuple[Head, ...] = ()
    condition: Condition | None = None
    init: Init = "normal"
    """How weights are initialised: `normal` with deviation 0.02 (BERT, Llama, ViT); `scaled`: the same, with the last
    linears of residual branches divided by √(2·depth) (GPT-2); `fan_in`: deviation 1 / √inputs (T5); `xavier`: uniform
    by inputs and outputs (Glorot & Bengio, 2010)."""

    # -- parts by name and kind

    @cached_property
    def _run_names(self) -> dict[str, Run]:
        return {run.name: run for run in self.runs}

    def run(self, name: str) -> Run:
        """The run called `name`."""
        return self._run_names[name]

    def path_to(self, run: Run | None) -> tuple[Run, ...]:
        """The runs that compute what a run returns, one after the other, from the one that reads an input."""
        path: list[Run] = []
        while run is not None:
            path.insert(0, run)
            run = self._run_names.get(run.reads)
        return tuple(path)

    def input_of(self, run: Run) -> Input:
        """The input whose tokens a run computes; the first if there are several."""
        return self.inputs_through(run)[0]

    def inputs_through(self, run: Run) -> tuple[Input, ...]:
        """The inputs whose samples a run computes, in the order of their samples."""
        first, *_ = path = self.path_to(run)
        chosen = next((at.input for at in reversed(path) if at.input), "")
        names = (chosen,) if chosen else (first.reads, *first.more_inputs)
        return tuple(one for name in names for one in self.inputs if one.name == name)

    def hides_later(self, run: Run, one: Input) -> bool:
        """Whether a run masks later tokens in the samples of an input."""
        return run.causal or (isinstance(one, TokenInput) and one.ordered)

    def enters(self, run: Run) -> bool:
        """Whether a run reads an input, and not another run."""
        return any(one.name == run.reads for one in self.inputs)

    def heads_of(self, kind: type[H]) -> tuple[H, ...]:
        """The heads of one kind."""
        return tuple(head for head in self.heads if isinstance(head, kind))

    def inputs_of(self, kind: type[H]) -> tuple[H, ...]:
        """The inputs of one kind."""
        return tuple(one for one in self.inputs if isinstance(one, kind))

    def runs_of(self, heads: Container[str]) -> tuple[Run, ...]:
        """The runs that these heads read, and the memories of those runs, in order; not the runs between them and their
        inputs."""
        names = {head.run for head in self.heads if head.name in heads}
        for run in reversed(self.runs):
            if run.name in names:
                names |= {name for at in self.path_to(run) for name in at.memories}
        return tuple(run for run in self.runs if run.name in names)

    # -- sizes

    def length(self, run: Run) -> int:
        """Tokens of one sample that a run computes."""
        return self.input_of(run).length

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of one sample that each run computes."""
        return tuple(self.length(run) for run in self.runs)

    def samples(self, run: Run) -> float:
        """Average number of samples that a run computes per sample of a micro-batch."""
        return sum(one.share if isinstance(one, TokenInput) else 1.0 for one in self.inputs_through(run))

    @property
    def width(self) -> int:
        """Features of a token of the first run."""
        return self.runs[0].stack.width

    def width_of(self, one: Input) -> int:
        """Width of an input's tokens: that of the run that reads it."""
        reading = (run.stack.width for run in self.runs if one.name in (run.reads, *run.more_inputs))
        return next(reading, self.width)

    def memory_width(self, run: Run) -> int:
        """Width of the memory that a run's cross attention reads, the largest of several; 0 if it has none."""
        return max([0, *(self.run(name).stack.width for name in run.memories)])

    def width_before(self, run: Run) -> int:
        """Width of the tokens that a run reads."""
        return self._run_names.get(run.reads, run).stack.width

    @cached_property
    def main(self) -> Run:
        """The run that the last head reads, whose tokens are counted in figures per token."""
        return self.run(self.heads[-1].run) if self.heads else self.runs[-1]

    # -- what the model is for

    @cached_property
    def vision(self) -> bool:
        """Whether images are its only input."""
        return all(isinstance(one, PatchInput) for one in self.inputs)

    @property
    def images(self) -> PatchInput:
        """The first input of images, if there is one."""
        return self.inputs_of(PatchInput)[0]

    @cached_property
    def words(self) -> WordHead | None:
        """The head for words that generates text: the last one on a causal run, else the last."""
        heads = self.heads_of(WordHead)
        causal = [head for head in heads if self.run(head.run).causal]
        return (causal or heads or (None,))[-1]

    @cached_property
    def classes(self) -> ClassHead | None:
        """The first head for classes, if there is one."""
        return next(iter(self.heads_of(ClassHead)), None)

    @cached_property
    def pixels(self) -> PixelHead | None:
        """The first head for images, if there is one."""
        return next(iter(self.heads_of(PixelHead)), None)

    @property
    def tied(self) -> dict[str, str]:
        """Names of tied head weights, mapped to the names of the tables of tokens that they share."""
        return {f"{head.name}.weight": f"{head.tied}.weight" for head in self.heads_of(WordHead) if head.tied}

    @cached_property
    def writer(self) -> Run | None:
        """The causal run that generates text token by token; None if there is none."""
        run = None if self.words is None else self.run(self.words.run)
        return run if run is not None and run.causal else None

    @cached_property
    def text(self) -> Input | None:
        """The input of texts that the writer continues."""
        return None if self.writer is None else self.input_of(self.writer)

    @cached_property
    def written(self) -> tuple[Run, ...]:
        """The runs that compute a generated text, from its input to the writer."""
        return self.path_to(self.writer)

    @cached_property
    def remembered(self) -> tuple[Run, ...]:
        """The runs that are computed once before a text is generated: the memories of its runs, and all runs that these
        read."""
        wanted = {name for run in self.written for name in run.memories}
        runs: list[Run] = []
        for run in reversed(self.runs):
            if run.name in wanted:
                runs.insert(0, run)
                wanted |= {run.reads, *run.memories}
        return tuple(runs)

    @cached_property
    def generates(self) -> bool:
        """Whether it can generate texts: a head for words reads a causal run, which has at most one memory, computed
        from one input of tokens."""
        memories = {run.memories for run in self.written if run.memories}
        sources = {self.input_of(run) for run in self.remembered}
        alone = all(len(names) == 1 for names in memories) and max(len(memories), len(sources)) <= 1
        return self.writer is not None and alone and all(isinstance(one, TokenInput) for one in sources)

    @cached_property
    def padded(self) -> str:
        """Input of the argument `lengths`: the first whose padding affects a run or a vector; "" if there is none."""
        every = ((run, one) for run in self.runs for one in self.inputs_through(run))
        looked = {name for run in self.runs for name in run.memories}
        looked |= {head.run for head in self.heads_of(VectorHead)}
        seen = (
            one for run, one in every
            if isinstance(one, TokenInput) and (run.name in looked or not self.hides_later(run, one))
        )  # fmt: skip
        return next((one.name for one in seen), "")

    @cached_property
    def form(self) -> str:
        """The inputs that the last head depends on, in words, with `causal` before those of a causal run, and the
        number of heads if there are several. Input images of a head for images are called noisy."""
        run = self.main
        if self.pixels is not None and len(self.heads) == 1:
            return "noisy images"
        kinds = [*(self.run(name) for name in run.memories), run]
        inputs = " and ".join(
            "images" if isinstance(self.input_of(r), PatchInput) else "tokens" for r in kinds
        )
        inputs = f"causal {inputs}" if run.causal else inputs
        return f"{inputs} with {len(self.heads)} heads" if len(self.heads) > 1 else inputs

    @cached_property
    def routed(self) -> bool:
        """Whether experts, or groups of them, are given with each sample."""
        return any(run.stack.router == "given" for run in self.runs if run.stack.experts)

    @cached_property
    def ranges(self) -> int:
        """Number of labels of samples if experts are given: equal ranges of times, for a model that denoises."""
        mixed = (run.stack for run in self.runs if run.stack.experts and run.stack.router == "given")
        counts = (s.labels or (s.router_groups if s.router_groups > 1 else s.experts) for s in mixed)
        return max(counts, default=max((run.stack.labels for run in self.runs), default=0))

    @cached_property
    def labelled(self) -> bool:
        """Whether each sample has a label, by which visits to experts are counted or its expert is chosen."""
        return self.routed or any(run.stack.labels for run in self.runs if run.stack.experts)

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The model's arguments in their order: its inputs, then their descriptions, then the choice of outputs."""
        text, seen = bool(self.inputs_of(TokenInput)), bool(self.padded)
        crossed = any(run.memories for run in self.runs)
        return (
            *(one.name for one in self.inputs),
            *(() if self.condition is None else ("times", "classes")[: 1 + (self.condition.classes > 0)]),
            *(("lengths",) if seen else ()),
            *(("segments",) if seen and not crossed else ()),
            *(("documents",) if text and not crossed else ()),
            *(("targets", "rows") if text and self.pixels is None else ()),
            *(("prefixes",) if any(one.prefix for one in self.inputs_of(TokenInput)) else ()),
            *(("smoothing", "past") if self.writer is not None else ()),
            *(("memory_index",) if any(len(run.memories) > 1 for run in self.runs) else ()),
            *(("routes",) if self.labelled else ()),
            *(("token_weights",) if any(run.modulated and run.memories for run in self.runs) else ()),
            *(("by_sample",) if self.words is not None else ()),
        )

    def ordered(self, **values: Any) -> tuple[Any, ...]:
        """The values of the model's arguments in their order, up to the last one given; other names are dropped."""
        every = [values.get(name) for name in self.arguments]
        while every[-1] is None:
            every.pop()
        return tuple(every)
