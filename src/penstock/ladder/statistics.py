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
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.ladder.result import Estimate

K = TypeVar("K", bound=Hashable)
Matrix = npt.NDArray[np.float64]

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
    """The fitted levels of all settings. `ratio` compares any two that rounds connect.

    Its matrices have a row for each round of two settings or more, and a column for each setting.
    """

    def __init__(self, rounds: Sequence[Mapping[K, float]]) -> None:
        """`rounds` are the logarithms of seconds per step, by setting."""
        turns = [turn for turn in rounds if len(turn) > 1]
        self._alone = [level for turn in rounds for level in turn.values()]
        self._index = {s: i for i, s in enumerate(dict.fromkeys(s for turn in turns for s in turn))}
        shape = len(turns), len(self._index)
        self._present, self._timings = np.zeros(shape, bool), np.zeros(shape)
        for row, turn in enumerate(turns):
            columns = [self._index[s] for s in turn]
            self._present[row, columns], self._timings[row, columns] = True, list(turn.values())
        self._weights, self._errors = self._present.astype(float), np.zeros(shape)
        self._levels, self._inverse = np.zeros(shape[1]), np.zeros((shape[1], shape[1]))
        for _ in range(_PASSES if turns else 0):
            self._solve()
            self._reweigh()
        self._spread()

    def speed(self, setting: K, over: K) -> float | None:
        """The value of `ratio` alone, which is much faster to compute; None also if only one of the two was timed."""
        i, j = self._index.get(setting), self._index.get(over)
        return None if i is None or j is None else math.exp(self._levels[j] - self._levels[i])

    def variance(self, setting: K, over: K) -> float | None:
        """Variance of the logarithm of `ratio`; None if no chain of rounds connects the two."""
        i, j = self._index.get(setting), self._index.get(over)
        if i is None or j is None or self._group[i] != self._group[j]:
            return None
        # A timing pulls both levels by its difference from the mean of its round, which includes it.
        effects = self._inverse[i] - self._inverse[j]
        pulls = self._weights * (effects - self._means(effects))
        return self._follows * float((pulls**2 @ self._variances).sum())

    def ratio(self, setting: K, over: K, floor: float = 0.0) -> Estimate | None:
        """Speed of a setting relative to `over`; None if no rounds connect the two.

        `floor` is the ratio minus one by which equal settings may differ; the interval is widened by it.
        """
        if setting == over:
            return Estimate.exact(1.0)
        variance = self.variance(setting, over)
        if variance is None:
            return None
        value = float(self._levels[self._index[over]] - self._levels[self._index[setting]])
        rounds = 2.0 * self._common * self._follows / variance if variance > 0 else float(len(self._present))
        wide = factor(rounds, self._freedom) * math.sqrt(variance) if variance > 0 else 0.0
        wide = math.hypot(wide, math.log1p(floor))
        low, high = math.exp(value - wide), math.exp(min(value + wide, 700.0))
        return Estimate(value=math.exp(value), low=low, high=high, rounds=max(1, round(rounds)))

    def noise_floor(self, setting: K, twin: K) -> float:
        """Ratio minus one by which two builds of one setting may differ, estimated from these two.

        The scatter of rounds explains a part of the difference's square, which is subtracted: f / (f - 2) times the
        estimated variance at f degrees of freedom, the mean square of Student's t. Never less than `FLOOR`, which is
        all that three rounds can show.
        """
        if self._freedom <= 2:
            return FLOOR
        explained = (self.variance(setting, twin) or 0.0) * self._freedom / (self._freedom - 2)
        difference = float(self._levels[self._index[setting]] - self._levels[self._index[twin]])
        return max(FLOOR, math.expm1(math.sqrt(max(0.0, difference**2 - explained))))

    def seconds(self, first: K) -> float:
        """Seconds per step of a setting at the machine's usual pace, taken from the median round."""
        if first not in self._index:
            return math.exp(np.median(self._alone)) if self._alone else math.nan
        paces = np.mean(self._timings - self._levels, axis=1, where=self._present)
        return math.exp(self._levels[self._index[first]] + np.median(paces))

    def _means(self, values: Matrix) -> Matrix:
        """The weighted mean of each round, as a column."""
        sums = (self._weights * values).sum(axis=1, keepdims=True)
        means: Matrix = sums / self._weights.sum(axis=1, keepdims=True)
        return means

    def _solve(self) -> None:
        """Weighted least squares: the rounds' levels eliminated, the rest by the normal equations.

        They give the levels up to a constant for each group of settings that rounds connect. A billionth of the largest
        entry on the diagonal fixes that constant, and changes no difference within a group.
        """
        weights = self._weights
        normal = np.diag(weights.sum(axis=0)) - (weights / weights.sum(axis=1, keepdims=True)).T @ weights
        self._inverse = np.linalg.inv(normal + 1e-9 * normal.diagonal().max() * np.eye(len(normal)))
        self._levels = self._inverse @ (weights * (self._timings - self._means(self._timings))).sum(axis=0)

    def _reweigh(self) -> None:
        """Huber's weights: a timing far off pulls as much as a timing at twice the usual distance."""
        errors = self._timings - self._levels
        self._errors = np.where(self._present, errors - self._means(errors), 0.0)
        sizes = np.abs(self._errors)
        limit = _HUBER * 1.483 * np.median(sizes[self._present])
        far = sizes > limit if limit > 0 else np.zeros_like(self._present)
        self._weights = self._present * np.divide(limit, sizes, out=np.ones_like(sizes), where=far)

    def _spread(self) -> None:
        """Estimate the variance of one timing, in common and by setting, and the correlation of successive errors."""
        in_round = self._present.sum(axis=1, keepdims=True)
        # In a round of k timings an error's expected square is (k - 1) / k of its true value.
        squares = (self._weights * self._errors**2 * in_round / (in_round - 1)).sum(axis=0)
        counts, rounds = self._present.sum(axis=0), len(self._present)
        timings = int(counts.sum())
        self._freedom = float(timings - rounds - len(counts) + 1)
        free = max(self._freedom, 1.0) / max(1.0, float(timings - rounds))
        self._common = float(squares.sum()) / max(1, timings) / free
        self._variances = (_PRIOR * self._common + squares / free) / (_PRIOR + counts)
        both = self._present[1:] & self._present[:-1]
        before, after = self._errors[:-1][both], self._errors[1:][both]
        # A few rounds show little of the errors' correlation, so some is assumed.
        assumed = _PRIOR_PAIRS * self._common
        follow = float(before @ after) + _PRIOR_CORRELATION * assumed
        total = float(before @ before + after @ after) / 2.0 + assumed
        correlation = min(0.8, max(0.0, follow / total)) if total > 0 else 0.0
        self._follows = (1.0 + correlation) / (1.0 - correlation)

    @functools.cached_property
    def _group(self) -> list[int]:
        """Group number of each setting; settings connected by a chain of rounds have the same."""
        group = list(range(len(self._index)))
        for present in self._present:
            joined = {number for number, there in zip(group, present, strict=True) if there}
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
