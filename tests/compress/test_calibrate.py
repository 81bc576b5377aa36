"""Calibration: what is recorded of inputs, and the limits that follow from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.families import ENROLLED, batches
from penstock.compress.calibrate import BINS, InputRecord, record
from penstock.compress.quantise import candidates
from penstock.config.model import stacks
from penstock.errors import ConfigError, NumericError
from penstock.models import create


def test_a_histogram_widens_without_losing_a_magnitude() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(50, 8) * size for size in (0.1, 1.0, 30.0, 2.0)]
    made = InputRecord(8)
    for part in parts:
        made.add(part)
    every = torch.cat(parts)
    assert made.rows == 200
    assert int(made.counts.sum()) == every.numel()
    assert torch.equal(made.largest, every.abs().amax(0))
    width = made.end / BINS
    for bound in (0.5, 5.0, 40.0):  # bins hold what is below them, up to a bin's width
        bins = int(bound / width)
        assert int((every.abs() <= (bins - 1) * width).sum()) <= int(made.counts[:bins].sum())
        assert int(made.counts[:bins].sum()) <= int((every.abs() <= (bins + 1) * width).sum())
    assert made.limit("absmax") == float(every.abs().max())
    with pytest.raises(NumericError, match="not finite"):
        made.add(torch.tensor([[float("nan")] * 8]))


def test_limits_cut_off_what_is_rare() -> None:
    torch.manual_seed(0)
    x = torch.randn(4000, 16)
    x[0, 0] = 60.0
    made = InputRecord(16)
    made.add(x)
    found: dict[str, float] = {how: made.limit(how) for how in ("absmax", "percentile", "mse", "entropy")}  # type: ignore[arg-type]
    assert found["absmax"] == 60.0
    within = float(x.abs().flatten().sort().values[int(0.9999 * x.numel())])
    assert found["percentile"] == pytest.approx(within, abs=2 * made.end / BINS)
    assert 3.0 < found["entropy"] < 30.0

    def error(end: float) -> float:
        step = end / 127
        return float(((x / step).round().clamp(-127, 127) * step - x).square().sum())

    ends = torch.linspace(0.1, 1.0, 91).tolist()
    least = min(error(60.0 * share) for share in ends)
    assert error(found["mse"]) == pytest.approx(least, rel=0.02), "as if all inputs had been kept"
    assert error(found["mse"]) < error(found["absmax"])


def _poisoned(config: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same batch with other words in its padding."""
    tokens, lengths = arguments[0].clone(), arguments[-1]
    padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
    tokens[padding] = (tokens[padding] + 5) % config.vocabulary
    return tokens, *arguments[1:]


@pytest.mark.parametrize("name", ["bert", "marian", "marian moe"])
def test_padding_is_not_recorded(name: str) -> None:
    config: Any = ENROLLED[name].config
    torch.manual_seed(0)
    model = create(config).eval()
    given = batches(config, 0, 4)
    arguments = given[:3] if len(stacks(config)) > 1 else given[:2]
    lengths: Tensor = arguments[-1]
    names = [linear for linear in candidates(model, "int8")[0] if not linear.startswith("decoder.")]
    names += [linear for linear in candidates(model, "int8")[0] if ".cross.kv" in linear]
    found, poisoned = (record(model, [one], names) for one in (arguments, _poisoned(config, arguments)))
    attention = next(linear for linear in names if linear.endswith("attention.qkv"))
    assert found[attention].rows == int(lengths.sum())
    for linear in names:
        assert found[linear].rows == poisoned[linear].rows
        torch.testing.assert_close(found[linear].largest, poisoned[linear].largest)


def test_a_text_is_recorded_up_to_its_last_target() -> None:
    config: Any = replace(ENROLLED["gpt"].config)
    model = create(config).eval()
    tokens, targets = batches(config, 0, 4)
    ends = ((targets != -100) * torch.arange(1, targets.shape[1] + 1)).amax(1)
    names = candidates(model, "int8")[0]
    found = record(model, [(tokens, None, targets)], names)
    assert {one.rows for one in found.values()} == {int(ends.sum())}
    assert {one.rows for one in record(model, [(tokens,)], names).values()} == {tokens.numel()}
    with pytest.raises(ConfigError, match="no data to calibrate with"):
        record(model, [], names)
