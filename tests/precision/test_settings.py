"""Levels as data: what each says, and which combinations are refused with the reason."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from helpers.cpus import pretend
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.precision import properties_of
from penstock.precision import settings as module
from penstock.precision.lists import default_lists


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_levels_are_the_published_table(dtype: str) -> None:
    scale = "dynamic" if dtype == "fp16" else 1.0
    table = {
        "O1": ("fp32", True, "fp32", "none", scale),
        "O2": (dtype, True, "fp32", "copy", scale),
        "O3": (dtype, False, dtype, "none", 1.0),
    }
    for level, expected in table.items():
        p = properties_of(level, dtype=dtype)
        assert (p.weights, p.by_lists, p.norms, p.masters, p.loss_scale) == expected
        assert p.compute == dtype


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_plan_has_the_properties_of_its_level(level: str, dtype: str) -> None:
    scale = {"loss_scale": "dynamic"} if dtype == "fp16" else {}
    found = numerics_of(Plan.parse(f"precision={level} dtype={dtype}"))
    assert found == properties_of(level, dtype=dtype, **scale)
    assert numerics_of(Plan()) == properties_of("O0")


def test_o0_is_fp32_and_unscaled() -> None:
    p = properties_of("O0")
    assert (p.half, p.weights, p.scales, p.outputs) == (False, "fp32", False, "keep")
    assert p.describe() == "O0: fp32 throughout"


@pytest.mark.parametrize(
    ("level", "dtype", "overrides", "reason"),
    [
        *(
            (typed, "auto", {}, f'capital letter O: "{meant}"')
            for typed, meant in (("01", "O1"), ("o2", "O2"))
        ),
        *((typed, "auto", {}, 'choose "O0"') for typed in ("O4", "fp16", "", "O")),
        ("O0", "fp16", {}, "has no effect with O0"),
        ("O0", "auto", {"loss_scale": "dynamic"}, "fp32 gradients do not vanish"),
        ("O0", "auto", {"weights": "half"}, "nothing is half"),
        ("O0", "auto", {"norms": "half"}, "norms='half' contradicts O0"),
        ("O0", "auto", {"lists": default_lists(torch.bfloat16)}, "lists have no effect with O0"),
        ("O1", "fp16", {"lists": {"fp32": ["torch.exp"]}}, "lists is a dict, but must be an OpLists"),
        ("O1", "fp16", {"lists": "x"}, "lists is a str, but must be an OpLists"),
        ("O1", "fp16", {"loss_scale": 1e39}, "beyond the numbers of fp32"),
        ("O1", "fp16", {"loss_scale": 1e-46}, "beyond the numbers of fp32"),
        ("O1", "fp16", {"master": "copy"}, "they are the master weights"),
        ("O1", "fp16", {"autocast": False}, "leaves nothing in half"),
        ("O1", "bf16", {"norms": "half"}, "contradicts weights='fp32'"),
        ("O2", "bf16", {"master": "remainder"}, "master=remainder was removed; leave it out"),
        ("O3", "bf16", {"products": "fp8_tensorwise"}, "needs autocast=True"),
        ("O1", "fp16", {"products": "fp8"}, "needs dtype='bf16'"),
        ("O1", "fp8", {}, "choose bf16, fp16 or auto"),
        ("O1", "fp16", {"loss_scale": -1.0}, "finite number above 0"),
        ("O1", "fp16", {"loss_scale": True}, "finite number above 0"),
        ("O1", "fp16", {"norms": "fp23"}, "must be one of 'fp32', 'half'"),
        ("O1", "fp16", {"loss_scal": 8.0}, "Did you mean 'loss_scale'"),
        # The names of other libraries and of former versions.
        ("O2", "float16", {}, "write fp16"),
        ("O2", "bfloat16", {}, "write bf16"),
        ("O2", "float32", {}, 'write precision="O0"'),
        ("O2", "fp16", {"loss_scale": "128.0"}, r"write the number 128\.0"),
        ("O2", "auto", {"opt_level": "O1"}, 'write precision="O1"'),
        ("O2", "auto", {"keep_batchnorm_fp32": True}, 'write norms="fp32"'),
        ("O2", "auto", {"num_losses": 3}, "write losses"),
        ("O2", "auto", {"master_weights": True}, 'write master="copy"'),
    ],
)
def test_contradictions_are_refused_with_the_reason(
    level: str, dtype: str, overrides: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        properties_of(level, dtype=dtype, **overrides)


def test_every_property_can_be_overridden() -> None:
    p = properties_of("O2", dtype="fp16", loss_scale=128, master="none", norms="half", outputs="keep")
    assert (p.loss_scale, p.masters, p.norms, p.outputs) == (128, "none", "fp16", "keep")
    assert p.scales
    # What follows from an override is not a contradiction.
    p = properties_of("O2", dtype="fp16", weights="fp32")
    assert (p.weights, p.gradients, p.masters, p.by_lists) == ("fp32", "fp32", "none", True)


def test_auto_never_chooses_fp16_on_a_cpu_and_says_what_it_chose(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module._once.cache_clear()
    pretend(monkeypatch, "avx512_bf16")
    with caplog.at_level(logging.INFO, logger="penstock"):
        for level in ("O1", "O2", "O3"):
            assert properties_of(level, device="cpu").compute == "bf16"
    assert [r.message for r in caplog.records] == [
        "dtype=auto chose bf16: CPUs have units for bf16 or none at all."
    ]


def test_auto_warns_once_of_a_cpu_without_units(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module._once.cache_clear()
    pretend(monkeypatch, "avx2")
    with caplog.at_level(logging.INFO, logger="penstock"):
        for _ in range(3):
            assert properties_of("O1", device="cpu").compute == "bf16"
        properties_of("O0", device="cpu")
    chosen, warned = caplog.records
    assert (
        chosen.message
        == "dtype=auto chose bf16: CPUs have units for bf16 or none at all, and this one has none."
    )
    assert warned.levelno == logging.WARNING
    assert "no units for bf16" in warned.message
    assert 'precision="O0"' in warned.message


@pytest.mark.parametrize(("capability", "expected"), [((7, 0), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")])
def test_auto_goes_by_the_gpu(
    capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_device(_: Any) -> tuple[int, int]:
        return capability

    monkeypatch.setattr(torch.cuda, "get_device_capability", of_device)
    assert properties_of("O1", device="cuda").compute == expected


def test_fp16_on_a_cpu_warns_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    module._once.cache_clear()
    for _ in range(3):
        properties_of("O1", dtype="fp16")
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "slower than fp32" in warnings[0]


def test_describe_names_every_property() -> None:
    p = properties_of("O2", dtype="fp16")
    assert p.describe() == (
        "O2 in fp16: weights fp16, each operation by the op lists, norms fp32, fp32 master weights, "
        "loss scale dynamic"
    )


@pytest.mark.parametrize(
    "wrong", [{"loss_scale": "102e=" * 1000}, {"loss_scale": "1" * 5000}, {"outputs": "k" * 5000}]
)
def test_what_is_refused_is_quoted_in_few_words(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as refused:
        properties_of("O1", dtype="fp16", **wrong)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 400
