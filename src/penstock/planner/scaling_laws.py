"""Model size and number of tokens for a given compute, by four published laws; each is named, because they disagree.

N is parameters, D tokens, C training FLOPs = 6 N D, L the expected loss in nats per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A model size and its tokens for a given compute, by one law."""

    law: str
    compute_flops: float
    parameters: float
    tokens: float
    loss: float
    """Expected, in nats per token of that law's data and tokenizer: to be compared within a law only."""

    @property
    def tokens_per_parameter(self) -> float:
        """D/N."""
        return self.tokens / self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametricLaw:
    """L(N, D) = E + A/N^α + B/D^β (Hoffmann et al. 2022, equation 2)."""

    name: str
    source: str
    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Expected loss in nats per token."""
        return float(self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta)

    def optimum(self, compute_flops: float) -> Allocation:
        """The least loss at a given compute, in closed form (equation 4)."""
        both = self.alpha + self.beta
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / both)
        parameters = g * (compute_flops / 6) ** (self.beta / both)
        return self.at(compute_flops, parameters)

    def at(self, compute_flops: float, parameters: float) -> Allocation:
        """The allocation at a given size and compute."""
        tokens = compute_flops / 6 / parameters
        loss = self.loss(parameters, tokens)
        return Allocation(
            law=self.name, compute_flops=compute_flops, parameters=parameters, tokens=tokens, loss=loss
        )  # fmt: skip

    def smaller(self, best: Allocation, share: float) -> Allocation | None:
        """A model of `share` times the optimum's size that is trained until it reaches the same loss; none if it never
        does."""
        parameters = best.parameters * share
        reducible_loss = best.loss - self.e - self.a / parameters**self.alpha
        if reducible_loss <= 0:
            return None
        tokens = (self.b / reducible_loss) ** (1 / self.beta)
        return self.at(6 * parameters * tokens, parameters)

    def with_inference(self, best: Allocation, served_tokens: float) -> Allocation:
        """The size that reaches the loss of `best` for the least training and inference together: 6ND + 2N times the
        tokens served (Sardana et al. 2024, section 2)."""
        cheapest, least = best, best.compute_flops + 2 * best.parameters * served_tokens
        for i in range(1, 200):
            smaller = self.smaller(best, 0.98**i)
            if smaller is None:
                break
            cost = smaller.compute_flops + 2 * smaller.parameters * served_tokens
            if cost < least:
                cheapest, least = smaller, cost
        return cheapest


HOFFMANN = ParametricLaw(
    name="Hoffmann 2022", source="Hoffmann et al. 2022, approach 3, as published (rounded)",
    e=1.69, a=406.4, b=410.7, alpha=0.34, beta=0.28,
)  # fmt: skip
HOFFMANN_UNROUNDED = ParametricLaw(
    name="Hoffmann 2022, unrounded", source="Hoffmann et al. 2022, approach 3, exponents from the paper's TeX source",
    e=1.6934, a=406.4, b=410.7, alpha=0.3392, beta=0.2849,
)  # fmt: skip
BESIROGLU = ParametricLaw(
    name="Besiroglu 2024", source="Besiroglu et al. 2024, refit of approach 3 to the points of its figure",
    e=1.8172, a=482.01, b=2085.43, alpha=0.3478, beta=0.3658,
)  # fmt: skip
LAWS = (HOFFMANN, HOFFMANN_UNROUNDED, BESIROGLU)

_C_C, _ALPHA_C = 3.1e8, 0.050
_PF_DAY = 1e15 * 86400
_KAPLAN_N, _KAPLAN_POWER = 1.3e9, 0.73


def kaplan(compute_flops: float) -> Allocation:
    """The optimum of Kaplan et al. 2020: N = 1.3e9 C^0.73 with C in PF-days (section 6.1), L = (3.1e8/C)^0.05."""
    days = compute_flops / _PF_DAY
    parameters = _KAPLAN_N * days**_KAPLAN_POWER
    return Allocation(
        law="Kaplan 2020", compute_flops=compute_flops, parameters=parameters, tokens=compute_flops / 6 / parameters,
        loss=(_C_C / days) ** _ALPHA_C,
    )  # fmt: skip


def optima(compute_flops: float) -> list[Allocation]:
    """The optimum of every law."""
    if not compute_flops > 0 or math.isinf(compute_flops):
        raise ValueError(f"compute is {compute_flops}, but must be a number of FLOPs above 0")
    return [*(law.optimum(compute_flops) for law in LAWS), kaplan(compute_flops)]
