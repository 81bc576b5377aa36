"""One joint estimate of all rounds, intervals that hold at every stop, and no difference between equals."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import pytest

from helpers.sweeps import sweep
from penstock.ladder.result import Estimate
from penstock.ladder.statistics import ERROR_RATE, FLOOR, Joint, Journal, factor, verdict

ROUNDS = 30


def _rounds(rng: random.Random, levels: dict[str, float], count: int, noise: float) -> list[dict[str, float]]:
    found = []
    for _ in range(count):
        pace = rng.gauss(0.0, 0.2)
        found.append({s: level + pace + rng.gauss(0.0, noise) for s, level in levels.items()})
    return found


def test_exact_timings_give_exact_ratios_through_a_chain_of_rounds() -> None:
    """Only neighbours ever took turns, in rounds of very different pace."""
    journal: Journal[str] = Journal()
    seconds = {"a": 1.0, "b": 0.8, "c": 0.5, "d": 0.4}
    for pace, (one, other) in zip((1.0, 3.0, 0.1), (("a", "b"), ("b", "c"), ("c", "d")), strict=True):
        journal.add({one: pace * seconds[one], other: pace * seconds[other]})
    joint = journal.joint()
    for setting, taken in seconds.items():
        ratio = joint.ratio(setting, "a")
        assert ratio is not None
        assert ratio.value == pytest.approx(1.0 / taken)
        assert joint.speed(setting, "a") == pytest.approx(1.0 / taken)
    assert joint.ratio("d", "nothing") is None


def test_settings_that_no_rounds_connect_have_no_ratio() -> None:
    journal: Journal[str] = Journal()
    journal.add({"a": 1.0, "b": 2.0})
    journal.add({"c": 1.0, "d": 2.0})
    assert journal.joint().ratio("a", "c") is None
    assert journal.joint().ratio("d", "c") is not None


def test_the_joint_estimate_is_that_of_least_squares() -> None:
    """Two settings in all rounds: the mean of the paired differences, and its standard error."""
    rng = random.Random(1)
    rounds = _rounds(rng, {"a": 0.0, "b": -0.3}, 200, 0.01)
    differences = [turn["a"] - turn["b"] for turn in rounds]
    mean = sum(differences) / 200
    error = math.sqrt(sum((d - mean) ** 2 for d in differences) / 199 / 200)
    joint = Joint(rounds)
    ratio = joint.ratio("b", "a")
    assert ratio is not None
    assert math.log(ratio.value) == pytest.approx(mean, abs=0.3 * error)
    assert math.log(ratio.high / ratio.value) == pytest.approx(error * factor(200, 199), rel=0.25)


def test_steps_multiply_to_the_total_whatever_the_noise() -> None:
    rng = random.Random(2)
    rounds = _rounds(rng, {"a": 0.0, "b": -0.1, "c": -0.3}, 5, 0.05) + _rounds(
        rng, {"a": 0.0, "c": -0.3}, 3, 0.05
    )
    joint = Joint(rounds)
    steps = [joint.speed("b", "a"), joint.speed("c", "b")]
    assert math.prod(step or 0.0 for step in steps) == pytest.approx(joint.speed("c", "a"))


def test_a_slow_step_now_and_then_moves_little() -> None:
    rng = random.Random(3)
    rounds = _rounds(rng, {"a": 0.0, "b": 0.0}, 30, 0.01)
    for turn in rounds[::10]:
        turn["b"] += 1.0  # three of thirty took 2.7 times as long
    assert Joint(rounds).speed("b", "a") == pytest.approx(1.0, abs=0.02)


def test_the_factor_of_an_interval_is_that_of_the_mixture() -> None:
    """At the bound the Bayes factor is one over the error rate; below a few rounds there is no bound."""
    t, k, f = factor(20, 19), 1 + 20 * 10.0, 19
    assert k**-0.5 * ((1 + t**2 / f) / (1 + t**2 / (f * k))) ** ((f + 1) / 2) == pytest.approx(1 / ERROR_RATE)
    assert factor(2, 1) == math.inf
    assert factor(20, 19) > factor(20, 200) > math.sqrt(math.log(1 / ERROR_RATE))


def test_what_may_be_said() -> None:
    def estimate(value: float, half: float) -> Estimate:
        return Estimate(value=value, low=value * math.exp(-half), high=value * math.exp(half), rounds=10)

    assert verdict(estimate(1.2, 0.1), 3, 7) == "faster"
    assert verdict(estimate(1.2, 0.1), 2, 7) == "open"  # too few for anything
    assert verdict(estimate(1.04, 0.01), 6, 7) == "open"  # a small difference wants the full number
    assert verdict(estimate(1.04, 0.01), 7, 7) == "faster"
    assert verdict(estimate(0.9, 0.05), 7, 7) == "slower"
    assert verdict(estimate(1.001, 0.009), 7, 7) == "same"
    assert verdict(estimate(1.001, 0.02), 7, 7) == "open"


def test_the_noise_floor_is_what_rounds_do_not_explain() -> None:
    rng = random.Random(4)
    assert Joint(_rounds(rng, {"a": 0.0, "b": 0.0}, 10, 0.01)).noise_floor("a", "b") <= 0.01
    assert Joint(_rounds(rng, {"a": 0.0, "b": 0.04}, 10, 0.01)).noise_floor("a", "b") == pytest.approx(
        0.04, abs=0.01
    )


def _race(rng: random.Random, gain: float, tails: bool) -> tuple[str, int]:
    """A race of two to its end, on a machine that drifts, whose errors follow each other, some of them large."""
    journal: Journal[int] = Journal()
    pace, errors = 0.0, [0.0, 0.0]
    for count in range(1, ROUNDS + 1):
        pace += rng.gauss(0.003, 0.02)
        for i in (0, 1):
            size = 0.008 / math.sqrt(max(0.05, rng.gammavariate(1.5, 1 / 1.5))) if tails else 0.01
            errors[i] = 0.3 * errors[i] + math.sqrt(1 - 0.3**2) * rng.gauss(0.0, size)
        journal.add({i: math.exp(pace + errors[i] - gain * i) for i in (0, 1)})
        ratio = journal.joint().ratio(1, 0, FLOOR)
        assert ratio is not None
        said = verdict(ratio, count, 7)
        if said != "open":
            return said, count
    return "open", ROUNDS


@pytest.mark.parametrize("tails", sweep([False, True], [True]))
def test_of_a_hundred_races_between_equals_at_most_two_are_called_different(tails: bool) -> None:
    rng = random.Random(5)
    said = [_race(rng, 0.0, tails)[0] for _ in range(100)]
    assert said.count("faster") + said.count("slower") <= 2


@pytest.mark.parametrize("tails", [False, True])
def test_gains_are_found(tails: bool) -> None:
    """5 % by errors of 1 % in some seven rounds, nearly always; 3 % mostly."""
    rng = random.Random(6)
    five = [_race(rng, 0.05, tails) for _ in range(40)]
    three = [_race(rng, 0.03, tails) for _ in range(40)]
    assert sum(said == "faster" for said, _ in five) >= 39
    assert sum(count for _, count in five) / 40 < 10
    assert sum(said == "faster" for said, _ in three) >= 34
    assert all(said != "slower" for said, _ in five + three)


def test_all_but_measuring_is_free_of_torch() -> None:
    modules = "statistics, space, account, course, result, show, settings"
    code = (
        f"import sys; from penstock.ladder import {modules}; from penstock.ladder.rungs import all_rungs; all_rungs(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
