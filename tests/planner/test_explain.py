"""What `penstock plan` says of a layout in sentences."""

from __future__ import annotations

from penstock.planner.explain import bends


def test_the_curve_of_devices_says_why_it_bends() -> None:
    perfect = [(8, 64, {"gemm": 4.0}), (16, 64, {"gemm": 2.0})]
    assert bends(perfect) == ["Time falls as devices grow in number: nothing bends the curve here."]
    bent = [*perfect, (32, 64, {"gemm": 1.0, "bubble": 0.5, "data": 0.1})]
    (words,) = bends(bent)
    assert (
        words == "From 16 to 32 devices a sample takes 60% more device time, most of it for pipeline bubble."
    )
    # Devices by their samples: twice the batch in twice the time is no bend.
    assert bends([perfect[0], (8, 128, {"gemm": 8.0})]) == bends(perfect)
