"""The order of schedules in `benchmarks/predicted_layouts.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from predicted_layouts import orders

    yield orders
    for name in ("predicted_layouts", "predicted_own_runs"):
        sys.modules.pop(name, None)


def _case(schedule: str, measured: tuple[float, ...], simulated: float) -> dict[str, Any]:
    rounds = [{"yardsticks": one, "simulated": simulated} for one in measured]
    return {"model": "gpt", "plan": f"pp=2 accumulate=4 schedule={schedule}", "rounds": rounds}


def test_an_order_is_contradicted_by_differences_beyond_their_spread(orders: Any) -> None:
    slow, fast = _case("gpipe", (2.0, 2.1, 2.2), 1.0), _case("1f1b", (1.0, 1.1, 1.1), 2.0)
    (found,) = orders([slow, fast])
    assert (found["measured"], found["simulated"]) == (["1f1b", "gpipe"], ["gpipe", "1f1b"])
    assert found["apart"] == [True]
    assert found["against_the_simulated_order"] == ["1f1b before gpipe"]
    assert found["agrees"] is False


@pytest.mark.parametrize(("measured", "simulated"), [((0.8, 1.3, 1.0), 2.0), ((0.5, 0.6, 0.6), 0.5)])
def test_an_order_agrees_within_the_noise_and_with_the_simulation(
    orders: Any, measured: tuple[float, ...], simulated: float
) -> None:
    (found,) = orders([_case("gpipe", (1.0, 1.1, 1.1), 1.0), _case("1f1b", measured, simulated)])
    assert found["against_the_simulated_order"] == []
    assert found["agrees"] is True


def test_one_round_tells_no_order_and_one_schedule_has_none(orders: Any) -> None:
    (found,) = orders([_case("gpipe", (1.0,), 1.0), _case("1f1b", (2.0,), 2.0)])
    assert found["agrees"] is None
    assert orders([_case("gpipe", (1.0, 1.0), 1.0)]) == []
