"""Joint analysis of a run's timings: one estimate, intervals valid at every stop, and verdicts.

Model: the logarithm of seconds per step is y[round, setting] = a[setting] + b[round] + e. A round's own level b absorbs
whatever the machine does to all settings of that round: drift, heat, other programs. The a are found by least squares
over all rounds of the run, with Huber's weights, so that a single slow step counts little. Every ratio is exp(a - a'),
so that steps multiply to the total. Free of torch.

Intervals are valid whenever the measuring stops (Robbins 1970; Johari et al. 2017, "Peeking at A/B tests"): they come
from a mixture of likelihood ratios over the size of the difference, in its form for an unknown variance. If successive
errors are correlated with r, they are wider by (1 + r) / (1 - r).
"""

from __future__ import annotations

import functools
import math
import operator
import statistics
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, Literal, TypeVar

from penstock.ladder.result import Estimate

K = TypeVar("K", bound=Hashable)

ERROR_RATE = 0.02
"""Probability that an interval misses the truth at any of the rounds at which it is read."""
NARROW = 0.01
"""An interval of ± this is narrow enough to stop measuring."""
SMALL = 0.05
"""A difference below this needs the full number of rounds before it is believed."""
FEWEST = 3
"""Least number of rounds before any difference is believed."""
FLOOR = 0.005
"""The least noise floor: two builds of one setting differ by some tenths of a per cent because of where their memory
is, and no number of rounds reduces that."""
_SCALE = 10.0
"""Variance of the expected differences, in variances of one round: a few per cent if rounds scatter by one."""
_HUBER = 2.0
_PRIOR = 6.0
"""Number of rounds for which the common variance counts in the variance of each setting."""
_PRIOR_CORRELATION, _PRIOR_PAIRS = 0.3, 20
"""Correlation of successive errors that is assumed at first, and the number of pairs for which it counts."""
_PASSES = 3

Verdict = Literal["faster", "slower", "same", "open"]


def factor(rounds: float, freedom: float, error_rate: float = ERROR_RATE) -> float:
    """Half-width of an interval in standard errors, valid at all rounds at once. Infinite for too few rounds.

    With t the difference in standard errors, the Bayes factor of N(0, `_SCALE`) effects against none is
    k**-½ · [(1 + t²/f) / (1 + t²/(f k))]**((f + 1)/2), k = 1 + rounds · `_SCALE`, which exceeds 1/`error_rate` at any
    time with a probability of at most `error_rate` (Ville). This returns that t.
    """
    k = 1.0 + rounds * _SCALE
    if freedom <= 0:
        return math.inf
    needed = math.exp(2.0 / (freedom + 1.0) * math.log(math.sqrt(k) / error_rate))
    return math.inf if needed >= k else math.sqrt(freedom * (needed - 1.0) / (1.0 - needed / k))


class Journal(Generic[K]):
    """Seconds per step, by round and setting. `joint` fits all of them at once."""

    def __init__(self) -> None:
        self._rounds: list[dict[K, float]] = []
        self._solved: Joint[K] | None = None

    def add(self, seconds: Mapping[K, float]) -> None:
        """Record one round in which these settings took turns."""
        self._rounds.append({setting: math.log(spent) for setting, spent in seconds.items()})
        self._solved = None

    def joint(self) -> Joint[K]:
        """The joint estimate from all rounds so far."""
        if self._solved is None:
            self._solved = Joint(self._rounds)
        return self._solved


class Joint(Generic[K]):
    """The fitted levels of all settings. `ratio` compares any two that rounds connect."""

    def __init__(self, rounds: Iterable[Mapping[K, float]]) -> None:
        self._turns = [dict(turn) for turn in rounds if len(turn) > 1]
        self._alone = [level for turn in rounds for level in turn.values()]
        self._index = {s: i for i, s in enumerate(dict.fromkeys(s for turn in self._turns for s in turn))}
        self._weights = [dict.fromkeys(turn, 1.0) for turn in self._turns]
        self._levels = [0.0] * len(self._index)
        for _ in range(_PASSES if self._index else 0):
            self._solve()
            self._reweigh()
        self._spread()

    def speed(self, setting: K, over: K) -> float | None:
        """The value of `ratio` alone, which is much faster to compute; None also if only one of the two was timed."""
        i, j = self._index.get(setting), self._index.get(over)
        return None if i is None or j is None else math.exp(self._levels[j] - self._levels[i])

    def variance(self, setting: K, over: K) -> float | None:
        """Variance of the logarithm of `ratio`; None if no rounds connect the two."""
        i, j = self._index.get(setting), self._index.get(over)
        return None if i is None or j is None else self._variance(i, j)

    def ratio(self, setting: K, over: K, floor: float = 0.0) -> Estimate | None:
        """Speed of a setting relative to `over`; None if no rounds connect the two.

        `floor` is the ratio minus one by which equal settings may differ; the interval is widened by it.
        """
        if setting == over:
            return Estimate.exact(1.0)
        i, j = self._index.get(setting), self._index.get(over)
        if i is None or j is None:
            return None
        variance = self._variance(i, j)
        if variance is None:
            return None
        value = self._levels[j] - self._levels[i]
        rounds = 2.0 * self._common * self._follows / variance if variance > 0 else float(len(self._turns))
        wide = factor(rounds, self._freedom) * math.sqrt(variance) if variance > 0 else 0.0
        wide = math.hypot(wide, math.log1p(floor))
        return Estimate(
            value=math.exp(value),
            low=math.exp(value - wide),
            high=math.exp(min(value + wide, 700.0)),
            rounds=max(1, round(rounds)),
        )

    def noise_floor(self, setting: K, twin: K) -> float:
        """Ratio minus one by which two builds of one setting may differ, estimated from these two.

        The scatter of rounds explains a part of the difference's square, which is subtracted: f / (f - 2) times the
        estimated variance at f degrees of freedom, the mean square of Student's t. Never less than `FLOOR`, which is
        all that three rounds can show.
        """
        i, j = self._index[setting], self._index[twin]
        if self._freedom <= 2:
            return FLOOR
        explained = (self._variance(i, j) or 0.0) * self._freedom / (self._freedom - 2)
        excess = (self._levels[i] - self._levels[j]) ** 2 - explained
        return max(FLOOR, math.expm1(math.sqrt(max(0.0, excess))))

    def seconds(self, first: K) -> float:
        """Seconds per step of a setting at the machine's usual pace, that of the median round."""
        if first not in self._index:
            return math.exp(statistics.median(self._alone)) if self._alone else math.nan
        level = self._levels[self._index[first]]
        paces = [
            statistics.fmean(y - self._levels[self._index[s]] for s, y in turn.items())
            for turn in self._turns
        ]
        return math.exp(level + statistics.median(paces))

    def _solve(self) -> None:
        """Weighted least squares: the rounds' levels eliminated, the rest by the normal equations."""
        count = len(self._index)
        matrix = [[0.0] * count for _ in range(count)]
        right = [0.0] * count
        for turn, weights in zip(self._turns, self._weights, strict=True):
            total = sum(weights.values())
            mean = sum(weights[s] * y for s, y in turn.items()) / total
            for setting, y in turn.items():
                i, w = self._index[setting], weights[setting]
                right[i] += w * (y - mean)
                matrix[i][i] += w
                for other in turn:
                    matrix[i][self._index[other]] -= w * weights[other] / total
        self._inverse = inverse(matrix)
        self._levels = [sum(map(operator.mul, row, right)) for row in self._inverse]

    def _errors(self) -> list[dict[K, float]]:
        """Residual of each timing."""
        left = []
        for turn, weights in zip(self._turns, self._weights, strict=True):
            errors = {s: y - self._levels[self._index[s]] for s, y in turn.items()}
            level = sum(weights[s] * e for s, e in errors.items()) / sum(weights.values())
            left.append({s: e - level for s, e in errors.items()})
        return left

    def _reweigh(self) -> None:
        """Huber's weights: a timing far off pulls as much as a timing at twice the usual distance."""
        self._left = self._errors()
        sizes = [abs(e) for errors in self._left for e in errors.values()]
        limit = _HUBER * 1.483 * statistics.median(sizes)
        self._weights = [
            {s: 1.0 if abs(e) <= limit or limit == 0.0 else limit / abs(e) for s, e in errors.items()}
            for errors in self._left
        ]

    def _spread(self) -> None:
        """Estimate the variance of one timing, in common and by setting, and the correlation of successive errors."""
        squares: dict[K, float] = {}
        counts: dict[K, int] = {}
        before: dict[K, float] = {}
        follow = total = 0.0
        for errors, weights in zip(getattr(self, "_left", []), self._weights, strict=True):
            for s, e in errors.items():
                # In a round of k timings an error's expected square is (k - 1) / k of its true value.
                size = weights[s] * e * e * len(errors) / (len(errors) - 1)
                squares[s] = squares.get(s, 0.0) + size
                counts[s] = counts.get(s, 0) + 1
                if s in before:
                    follow += before[s] * e
                    total += (before[s] ** 2 + e * e) / 2.0
            before = dict(errors)
        timings = sum(counts.values())
        self._freedom = float(timings - len(self._turns) - len(self._index) + 1)
        free = max(self._freedom, 1.0) / max(1.0, float(timings - len(self._turns)))
        self._common = sum(squares.values()) / max(1, timings) / free
        own = {s: squares[s] / free for s in squares}
        self._own = {s: (_PRIOR * self._common + own[s]) / (_PRIOR + counts[s]) for s in squares}
        # A few rounds show little of the errors' correlation, so some is assumed.
        assumed = _PRIOR_PAIRS * self._common
        follow, total = follow + _PRIOR_CORRELATION * assumed, total + assumed
        correlation = min(0.8, max(0.0, follow / total)) if total > 0 else 0.0
        self._follows = (1.0 + correlation) / (1.0 - correlation)

    def _variance(self, i: int, j: int) -> float | None:
        """Variance of the difference between two levels; None if no chain of rounds connects them."""
        if self._group[i] != self._group[j]:
            return None
        row = [a - b for a, b in zip(self._inverse[i], self._inverse[j], strict=True)]
        pulls = (sum(map(operator.mul, scatter, row)) for scatter in self._scatter)
        return self._follows * float(sum(map(operator.mul, row, pulls)))

    @functools.cached_property
    def _scatter(self) -> list[list[float]]:
        """Variances and covariances of the pull that all timings exert on each level."""
        count = len(self._index)
        scatter = [[0.0] * count for _ in range(count)]
        for turn, weights in zip(self._turns, self._weights, strict=True):
            # A timing pulls against the mean of its round, which includes it.
            total = sum(weights.values())
            for source in turn:
                pull = {self._index[s]: weights[s] * ((s == source) - weights[source] / total) for s in turn}
                for i, a in pull.items():
                    for j, b in pull.items():
                        scatter[i][j] += a * b * self._own[source]
        return scatter

    @functools.cached_property
    def _group(self) -> list[int]:
        """Group number of each setting; settings connected by a chain of rounds have the same."""
        group = list(range(len(self._index)))
        for turn in self._turns:
            joined = {group[self._index[s]] for s in turn}
            group = [min(joined) if number in joined else number for number in group]
        return group


def verdict(ratio: Estimate, rounds: int, least: int) -> Verdict:
    """Verdict that an estimated speed ratio allows after `rounds` rounds of both settings.

    `open`: more rounds may decide. `same`: the interval is narrower than ±1 % (`NARROW`) and includes 1. A difference
    under 5 % (`SMALL`) is only believed after `least` rounds.
    """
    size = abs(math.log(ratio.value))
    if rounds < FEWEST or (rounds < least and size < SMALL):
        return "open"
    if ratio.low > 1.0:
        return "faster"
    if ratio.high < 1.0:
        return "slower"
    return "same" if math.log(ratio.high / ratio.value) < NARROW and rounds >= least else "open"


def inverse(matrix: list[list[float]]) -> list[list[float]]:
    """The inverse of a symmetric matrix without negative eigenvalues; nearly so for a zero eigenvalue.

    Levels of settings are known up to a constant for each group that rounds connect. A billionth of the largest entry
    on the diagonal fixes that constant, and changes no difference within a group.
    """
    size = len(matrix)
    little = 1e-9 * max((row[i] for i, row in enumerate(matrix)), default=1.0)
    work = [
        [*row[:i], row[i] + little, *row[i + 1 :], *(float(i == j) for j in range(size))]
        for i, row in enumerate(matrix)
    ]
    for i in range(size):
        pivot = work[i][i]
        row = work[i] = [value / pivot for value in work[i]]
        for j in range(size):
            if j != i and work[j][i] != 0.0:
                scale = work[j][i]
                work[j] = [a - scale * b for a, b in zip(work[j], row, strict=True)]
    return [row[size:] for row in work]
