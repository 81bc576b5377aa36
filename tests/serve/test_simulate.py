"""The queueing simulation beside what queueing theory says, and beside the same traffic one step at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.planner.serve import StepCosts
from penstock.serve.scheduler import Limits, TooLong
from penstock.serve.traffic import Arrival, Outcome, Rate, Served, Spread, read_trace, requests_of, simulate

ENDLESS = 1 << 20
FLAT = StepCosts(((1.0, 0.0), (2.0, 0.0)), ((1.0, 0.01, 0.0),))
"""Ten milliseconds a token, whatever the batch; prompts are free."""


def test_one_server_waits_as_long_as_theory_says() -> None:
    """A queue of random arrivals and equal services waits ρ / (2 (1 − ρ)) services on average (Pollaczek and
    Khinchine)."""
    costs = StepCosts(((1.0, 0.1), (2.0, 0.1)), ((1.0, 1.0, 0.0),))
    arrivals = Rate(rate=7.0, prompt=(1, 1), answer=(1, 1)).arrivals(100_000, seed=3)
    outcomes = simulate(arrivals, Limits(slots=1, waiting=ENDLESS), costs)
    mean_wait = 0.7 / (2 * 0.3) * 0.1
    # The median of an M/D/1 queue at 70 %, from its distribution (Erlang, 1909), is 0.068 s; the mean 0.117 s.
    assert outcomes.latency.p50 - 0.1 < mean_wait < outcomes.latency.p95 - 0.1
    waits = _waits(arrivals, 0.1)
    assert sum(waits) / len(waits) == pytest.approx(mean_wait, rel=0.03)
    assert outcomes.latency.p95 == pytest.approx(0.1 + sorted(waits)[int(0.95 * len(waits)) - 1], rel=1e-6)


def _waits(arrivals: list[Arrival], service: float) -> list[float]:
    """Lindley's recursion (1952)."""
    waits, free = [], 0.0
    for one in arrivals:
        waits.append(max(0.0, free - one.at))
        free = max(free, one.at) + service
    return waits


def test_tokens_of_many_sequences_come_together() -> None:
    served = simulate([Arrival(0.0, 4, 101)] * 8, Limits(slots=8), FLAT)
    assert served.latency.p50 == pytest.approx(1.0)
    assert served.tokens_per_second == pytest.approx(808)
    half = simulate([Arrival(0.0, 4, 101)] * 8, Limits(slots=4), FLAT)
    assert (half.latency.p50, half.latency.p95) == (pytest.approx(1.0), pytest.approx(2.0))


def test_a_request_joins_while_others_are_under_way() -> None:
    served = simulate([Arrival(0.0, 4, 101), Arrival(0.5, 4, 11)], Limits(slots=2), FLAT)
    assert served.latency.p50 == pytest.approx(0.1, abs=0.011)
    assert served.latency.p95 == pytest.approx(1.0)
    alone = simulate([Arrival(0.0, 4, 101), Arrival(0.5, 4, 11)], Limits(slots=1), FLAT)
    assert alone.first_token.p95 == pytest.approx(0.5)


def test_longer_caches_make_steps_longer() -> None:
    costs = StepCosts(((1.0, 0.0), (2.0, 0.0)), ((1.0, 0.01, 0.001), (2.0, 0.01, 0.002)))
    served = simulate([Arrival(0.0, 10, 5)], Limits(), costs)
    assert served.latency.p50 == pytest.approx(sum(0.01 + 0.001 * (10 + made) for made in range(1, 5)))


def test_a_requests_way_delays_it_and_keeps_no_engine_busy() -> None:
    arrivals = [Arrival(0.0, 4, 101)] * 8
    slow = simulate(arrivals, Limits(slots=4), replace(FLAT, request=0.5))
    assert (slow.latency.p50, slow.latency.p95) == (pytest.approx(1.5), pytest.approx(2.5))


def test_a_step_computes_all_slots_between_the_first_and_the_last() -> None:
    """The second of three texts ends at once, and its slot is computed until another text has it."""
    costs = StepCosts(((1.0, 0.0), (2.0, 0.0)), ((1.0, 0.01, 0.0), (8.0, 0.08, 0.0)))
    arrivals = [Arrival(0.0, 4, 101), Arrival(0.0, 4, 1), Arrival(0.0, 4, 101)]
    assert simulate(arrivals, Limits(slots=8), costs).latency.p95 == pytest.approx(3.0)
    assert simulate(arrivals[:1] + arrivals[2:], Limits(slots=8), costs).latency.p95 == pytest.approx(2.0)


def test_steps_look_at_as_many_tokens_as_the_longest_text_has() -> None:
    costs = StepCosts(((1.0, 0.0), (2.0, 0.0)), ((1.0, 0.0, 0.001), (2.0, 0.0, 0.001)))
    served = simulate([Arrival(0.0, 100, 2), Arrival(0.0, 10, 2)], Limits(), costs)
    assert served.latency.p50 == pytest.approx(0.101)


def test_steps_taken_together_are_those_taken_one_by_one() -> None:
    """A turn that nothing interrupts is counted once for many steps; with a costly stranger every step is its own."""
    costs = StepCosts(((1.0, 0.002), (512.0, 0.3)), ((1.0, 0.01, 1e-6), (16.0, 0.03, 1e-5)))
    arrivals = Rate(rate=12, prompt=(5, 200), answer=(1, 60)).arrivals(400, seed=5)
    together = simulate(arrivals, Limits(slots=16, waiting=ENDLESS, chunk=64), costs)

    class Slow:
        """The same costs, an exception where several steps would be taken at once."""

        request = costs.request
        prefill = staticmethod(costs.prefill)
        decode = staticmethod(costs.decode)

    from penstock.serve import traffic as module

    taken = module._steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_steps", lambda turn, rows, by, end: taken(turn, rows, by, min(end, 1e-12)))
        single = simulate(arrivals, Limits(slots=16, waiting=ENDLESS, chunk=64), Slow())
    assert together.latency.p95 == pytest.approx(single.latency.p95, rel=1e-3)
    assert together.tokens_per_second == pytest.approx(single.tokens_per_second, rel=1e-3)


def test_a_full_queue_refuses_and_replicas_share() -> None:
    arrivals = Rate(rate=100, prompt=(4, 4), answer=(21, 21)).arrivals(500)
    small = simulate(arrivals, Limits(slots=1, waiting=2), FLAT)
    assert small.requests == 500
    assert 465 < small.refused < 480
    assert simulate(arrivals, Limits(slots=1, waiting=2), FLAT, replicas=40).refused < 40
    with pytest.raises(TooLong):
        simulate([Arrival(0.0, 60, 20)], Limits(context=64), FLAT)


def test_spreads_are_of_the_requests_themselves() -> None:
    assert Spread.of([]) == Spread()
    assert Spread.of([3.0]) == Spread(p50=3.0, p95=3.0, p99=3.0)
    assert Spread.of(range(1, 101)) == Spread(p50=50, p95=95, p99=99)
    one = Served.of([Outcome(1.0, 2.0, 4.0, 5), Outcome(2.0, 3.0, 3.0, 1)], refused=1)
    assert (one.requests, one.seconds, one.tokens_per_second) == (3, 3.0, 2.0)
    assert one.per_token == Spread(p50=0.5, p95=0.5, p99=0.5)


def test_a_rate_is_read_and_drawn() -> None:
    rate = Rate.parse("rate=20 in=64..512 out=128")
    drawn = rate.arrivals(5000)
    assert drawn == rate.arrivals(5000) != rate.arrivals(5000, seed=1)
    assert drawn[-1].at / 5000 == pytest.approx(1 / 20, rel=0.05)
    assert min(one.prompt for one in drawn) == 64
    assert max(one.prompt for one in drawn) == 512
    assert {one.answer for one in drawn} == {128}


@pytest.mark.parametrize(
    ("text", "said"),
    [("rate=20", "in= is missing"), ("rate=0 in=1 out=1", "above 0"), ("rate=x in=1 out=1", "must be a number"),
     ("rate=1 in=9..3 out=1", "the fewest first"), ("rate=1 in=5 out=1e99", "out="),
     ("rate=1 in=5 out=1 tea=2", "'tea' is not part")],
)  # fmt: skip
def test_a_bad_rate_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Rate.parse(text)


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 9, "in": 3, "out": 4}\n\n{"at": 7.5, "in": 1, "out": 2, "user": "x"}\n')
    assert requests_of(str(path), 10) == [Arrival(0.0, 1, 2), Arrival(1.5, 3, 4)]


@pytest.mark.parametrize(
    "line",
    ["", "[1]", '{"at": 1}', '{"at": -1, "in": 1, "out": 1}', '{"at": 1, "in": 0, "out": 1}', '{"at": NaN, "in": 1, '
     '"out": 1}', '{"at": 1, "in": 1.5, "out": 1}', "x" * 100_000, '{"at": 1, "in": 1, "out": 99999999999}'],
)  # fmt: skip
def test_a_broken_trace_names_its_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=r"(?i)line 1 |has no request"):
        read_trace(path)
    with pytest.raises(Exception, match="does not exist"):
        read_trace(tmp_path / "none.jsonl")
