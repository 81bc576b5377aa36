"""The published optima, which disagree, and what over-training costs."""

from __future__ import annotations

import pytest

from penstock.planner.scaling_laws import BESIROGLU, HOFFMANN, HOFFMANN_UNROUNDED, kaplan, optima

CHINCHILLA = 5.76e23


@pytest.mark.parametrize(
    ("law", "parameters", "tokens", "ratio", "loss"),
    [
        (HOFFMANN, 3.219e10, 2.982e12, 92.6, 1.9307),
        (HOFFMANN_UNROUNDED, 4.031e10, 2.382e12, 59.1, 1.9184),
        (BESIROGLU, 7.225e10, 1.329e12, 18.4, 1.9744),
    ],
)
def test_at_chinchilla_s_compute_the_laws_disagree(
    law: object, parameters: float, tokens: float, ratio: float, loss: float
) -> None:
    best = law.optimum(CHINCHILLA)  # type: ignore[attr-defined]
    assert best.parameters == pytest.approx(parameters, rel=2e-3)
    assert best.tokens == pytest.approx(tokens, rel=2e-3)
    assert best.tokens_per_parameter == pytest.approx(ratio, rel=2e-3)
    assert best.loss == pytest.approx(loss, abs=2e-4)


@pytest.mark.parametrize("law", [HOFFMANN, HOFFMANN_UNROUNDED, BESIROGLU])
def test_the_closed_form_is_a_minimum(law: object) -> None:
    best = law.optimum(1e22)  # type: ignore[attr-defined]
    assert 6 * best.parameters * best.tokens == pytest.approx(1e22)
    for factor in (0.7, 0.95, 1.05, 1.4):
        assert law.at(1e22, best.parameters * factor).loss > best.loss  # type: ignore[attr-defined]


def test_kaplan_wants_larger_models() -> None:
    best = kaplan(CHINCHILLA)
    assert best.parameters > 4 * BESIROGLU.optimum(CHINCHILLA).parameters
    assert best.tokens_per_parameter < 2
    assert len(optima(CHINCHILLA)) == 4


def test_more_serving_wants_smaller_models_of_the_same_loss() -> None:
    best = BESIROGLU.optimum(1e23)
    assert BESIROGLU.with_inference(best, 0.0) == best
    some = BESIROGLU.with_inference(best, 1e12)
    much = BESIROGLU.with_inference(best, 1e14)
    assert much.parameters < some.parameters < best.parameters
    assert BESIROGLU.loss(much.parameters, much.tokens) == pytest.approx(best.loss)
    assert much.compute_flops > best.compute_flops
    assert BESIROGLU.smaller(best, 0.001) is None


def test_no_compute_is_an_error() -> None:
    with pytest.raises(ValueError, match="must be a number of FLOPs above 0"):
        optima(0.0)
