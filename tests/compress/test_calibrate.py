"""Calibration: what is recorded of inputs, and the limits that follow from it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from helpers.families import ENROLLED, batches
from helpers.sweeps import sweep
from penstock.compress.calibrate import BINS, PERCENTILE, InputRecord, record, watch
from penstock.compress.data import QuantiseData
from penstock.compress.quantise import candidates, quantise_folder
from penstock.config.model import DecoderConfig, stacks
from penstock.config.quantise import Limit, QuantiseOptions
from penstock.errors import ConfigError, NumericError
from penstock.models import create
from penstock.models.convert import save_pretrained
from penstock.models.convert.pretrained import rounded_weights


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
    ends = torch.linspace(0.1, 1.0, 91).tolist()
    least = min(_error(x, 60.0 * share) for share in ends)
    assert _error(x, found["mse"]) == pytest.approx(least, rel=0.02), "as if all inputs had been kept"
    assert _error(x, found["mse"]) < _error(x, found["absmax"])


def _error(x: Tensor, end: float) -> float:
    """Summed squares of what rounding with this end of the scale changes."""
    step = end / 127
    return float(((x / step).round().clamp(-127, 127) * step - x).square().sum())


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


def test_a_translation_is_recorded_up_to_its_last_target() -> None:
    config: Any = ENROLLED["marian"].config
    model = create(config).eval()
    source, target, lengths, targets = batches(config, 0, 8)
    ends = ((targets != -100) * torch.arange(1, targets.shape[1] + 1)).amax(1)
    found = record(model, [(source, target, lengths, targets)], candidates(model, "int8")[0])
    for name, one in found.items():
        read = lengths if name.startswith("encoder.") or ".cross.kv" in name else ends
        assert one.rows == int(read.sum()), name


@pytest.mark.parametrize(
    "name", sweep(["gpt", "llama", "marian", "t5", "mixtral", "vit"], ["t5", "mixtral", "vit"])
)
def test_every_limit_is_that_of_all_inputs_in_every_kind_of_model(name: str, tmp_path: Path) -> None:
    """Beside inputs that were all kept; and a folder has the scales that follow from them."""
    config: Any = ENROLLED[name].config
    torch.manual_seed(0)
    model = create(config).eval()
    save_pretrained(model, tmp_path / "whole")
    given = [batches(config, step, 8) for step in range(4)]
    if not isinstance(config, DecoderConfig):
        given = [arguments[:-1] for arguments in given]
    else:
        given = [(tokens, None, targets) for tokens, targets in given]
    names, kept = candidates(model, "int8")[0], dict[str, list[Tensor]]()
    watch(model, given, names, lambda linear, x: kept.setdefault(linear, []).append(x.abs()))
    sizes = {linear: torch.cat(parts).flatten().sort().values for linear, parts in kept.items()}
    assert sizes.keys() == names.keys()
    for limit in get_args(Limit):
        options = QuantiseOptions(format="int8", inputs="static", limit=limit)
        quantise_folder(tmp_path / "whole", tmp_path / limit, options, QuantiseData(lambda: given))
        for linear, (_, weight) in rounded_weights(tmp_path / limit).items():
            assert weight.input_scale is not None
            found, x = 127 * float(weight.input_scale), sizes[linear]
            top = float(x[-1])
            if limit == "absmax":
                assert found == pytest.approx(top)
            elif limit == "percentile":
                share = float(x[math.ceil(PERCENTILE * len(x)) - 1])
                assert found == pytest.approx(share, abs=2.01 * 2 * top / BINS), linear
            elif limit == "mse":
                least = min(_error(x, top * share) for share in torch.linspace(0.1, 1.0, 91).tolist())
                assert _error(x, found) <= 1.03 * least, linear
            else:
                assert 0.1 * top <= found <= top * (1 + 1e-6), linear
