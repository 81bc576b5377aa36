"""Models of one body with two branches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from penstock.boundary.files import quoted
from penstock.config.convert import NotNegative, Range, Share, word
from penstock.config.graph import Before, ClassHead, Graph, Head
from penstock.config.model.family import Branch, Words
from penstock.config.model.text import DecoderConfig, EncoderConfig, TextFamily
from penstock.config.stack import Stack
from penstock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class UniversalConfig(TextFamily):
    """One body with two branches: an encoder that understands, a decoder that generates (Sun et al., 2021, "ERNIE 3.0",
    section 3.1).

    The body computes the texts of both at once, each with its own mask: texts to understand attend to all of their
    tokens, texts to continue only to earlier ones, so that no layer reveals the token to predict.
    """

    BRANCHES: ClassVar[tuple[Branch, ...]] = ("understanding", "generating")

    family: Literal["universal"] = "universal"
    shared: Stack = field(default_factory=Stack)
    understanding: Stack = field(default_factory=Stack)
    generating: Stack = field(default_factory=Stack)
    branches: tuple[Branch, ...] = BRANCHES
    """The branches of the model. A model with one branch reads only `tokens`."""
    head: Literal["words", "classes", "both"] = "words"
    """Outputs of the branch that understands: logits of each token over the vocabulary (`words`), logits of each sample
    over `classes`, read from its first token, or `both`."""
    classes: Words = 2
    words_weight: NotNegative = 1.0
    """Weight of the loss of masked words."""
    classes_weight: NotNegative = 1.0
    """Weight of the loss of classes."""
    next_weight: NotNegative = 1.0
    """Weight of the loss of the next token."""
    continued: Share = 1.0
    """Share of a batch's samples whose next tokens are predicted."""
    masked: Share = 1.0
    """Share of a batch's samples, counted from its end, whose words are masked. With `continued`, 1 and 1 train both on
    every sample, and 0.5 and 0.5 one of them on each."""
    prefix: Share = 0.0
    """Share of the samples to continue whose prefix, of random length, is not causal, so that only the rest is
    predicted (Raffel et al., JMLR 2020, "T5", section 3.2.1, "prefix LM")."""
    token_types: Annotated[int, Range(0, 1 << 24)] = 0
    """Rows in the table of segment embeddings of texts to understand; 0 means no table."""
    output_bias: bool = False

    def _problems(self) -> Iterator[str]:
        if not self.branches or len(set(self.branches)) < len(self.branches):
            yield f"model.branches is {word(self.branches)}, but must name each branch once, and one at least."
            return
        if len(self.branches) == 2 and min(self.continued, self.masked) == 0:
            yield (
                "model.continued and model.masked must both be above 0 in a model of two branches; to leave one out, "
                "name the other alone in model.branches."
            )
        yield from super()._problems()

    @cached_property
    def graph(self) -> Graph:
        """Tokens to continue, and tokens to understand; one run over both; a run and its heads for each."""
        understands, both = "understanding" in self.branches, len(self.branches) == 2
        generates = "generating" in self.branches
        read = "hidden" if both else "tokens"
        tokens = replace(self._input("tokens", self.sequence), ordered=generates)
        tokens = replace(tokens, prefix=self.prefix) if generates else tokens
        hidden = self._input(read, self.sequence, self.token_types)
        if both:
            tokens, hidden = replace(tokens, share=self.continued), replace(hidden, share=self.masked)
        wide = self.shared.width
        shared = self._run(
            "shared", self.shared, "tokens", self.sequence, setting="model.shared",
            more_inputs=("hidden",) if both else (), causal=not understands,
            # A branch as wide as the body continues it as if both were one stack.
            last_norm=any(getattr(self, name).width != wide for name in self.branches),
        )  # fmt: skip
        runs, heads = [shared], list[Head]()
        for name in self.BRANCHES:
            if name in self.branches:
                own = {"input": read if name == "understanding" else "tokens"} if both else {}
                stack = getattr(self, name)
                run = self._run(name, stack, "shared", self.sequence, setting=f"model.{name}", **own)
                runs.append(replace(run, causal=name == "generating", embedding_norm=False))
        if understands and self.head != "words":
            before: Before = "tanh"
            dropout = self.understanding.dropout
            heads.append(
                ClassHead(
                    name="kind", run="understanding", classes=self.classes, before=before, dropout=dropout
                )
            )
        if understands and self.head != "classes":
            masked = replace(self._words("understanding", transform=True), name="masked")
            # A task that predicts only masked words sets this itself.
            heads.append(replace(masked, target_share=0.15) if generates or heads else masked)
        if generates:
            heads.append(replace(self._words("generating"), name="next"))
        inputs = ((tokens,) * generates) + ((hidden,) * understands)
        return Graph(inputs=inputs, runs=tuple(runs), heads=tuple(heads), init=self.init)

    def with_classes(self, count: int) -> Any:
        if "understanding" not in self.branches:
            raise ConfigError("model.branches lacks understanding, whose output classes need; add it.")
        return replace(self, head="classes", classes=count)

    def telling(self) -> Any:
        return replace(self, head="classes", branches=("understanding",))

    def writing(self) -> Any:
        return replace(self, branches=("generating",)) if "generating" in self.branches else self

    def branch(self, name: str) -> Any:
        if name not in self.branches:
            raise ConfigError(f"The model has no branch {quoted(name)}; choose {' or '.join(self.branches)}.")
        stack = getattr(self, name)
        differing = [
            one.name
            for one in fields(Stack)
            if one.name != "depth" and getattr(stack, one.name) != getattr(self.shared, one.name)
        ]
        if differing:
            raise ConfigError(
                f"model.{name} and model.shared differ in {', '.join(differing)}, so that they are not one stack of "
                "blocks, like an encoder or a decoder; keep both branches in one folder, or train them alike."
            )
        sizes = {one.name: getattr(stack, one.name) for one in fields(Stack)}
        sizes["depth"] = self.shared.depth + stack.depth
        common = {one.name: getattr(self, one.name) for one in fields(TextFamily)}
        if name == "generating":
            return DecoderConfig(**sizes, **common)
        return EncoderConfig(
            **sizes, **common, head="classes" if self.head == "classes" else "words", classes=self.classes,
            token_types=self.token_types,
        )  # fmt: skip
