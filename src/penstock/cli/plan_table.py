"""How `penstock plan` writes layouts: the columns of its table and the totals of a run, for terminal and page alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config.machine import Machine

if TYPE_CHECKING:
    from penstock.planner.prediction import Prediction
    from penstock.planner.search import Found

GIB = 2**30


def best_runnable(found: Found) -> Prediction | None:
    """The fastest layout that training can run today: of a vision model by itself, of a model handed in otherwise."""
    return next((one for one in found.predictions if one.plan.runnable), None)


def totals(one: Prediction, samples: float | None, machine: Machine, price: float | None) -> dict[str, float]:
    """Days, device hours, energy of the devices at their rated power, and cost of seeing so many samples."""
    if samples is None:
        return {}
    hours = one.gpu_hours(samples)
    found = {"days": one.days(samples), "gpu_hours": hours}
    if machine.power_watts:
        found["energy_megawatt_hours"] = hours * machine.power_watts / 1e6
    if price is not None:
        found["cost"] = hours * price
    return found


TOTALS = {
    "days": "days",
    "gpu_hours": "GPU hours",
    "energy_megawatt_hours": "MWh at rated power",
    "cost": "to pay",
}


def grouped(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


COLUMNS = (
    "tp",
    "pp",
    "dp",
    "micro",
    "virtual",
    "sharding",
    "recompute",
    "s/step",
    "MFU",
    "GiB",
    "bubble",
    "tokens/s/GPU",
)


LEGEND = (
    "tp, pp, dp (cp, ep): devices that share a layer, pipeline stages, replicas (that share a sample, experts). "
    "micro: samples at once × times a step. virtual: chunks of blocks per stage. "
    "GiB: on the fullest device. bubble: idle time over busy time."
)


def row(one: Prediction) -> list[str]:
    """One layout as words under `COLUMNS`."""
    p = one.plan
    extra = "".join(f" {name}{value}" for name, value in (("cp", p.cp), ("ep", p.ep)) if value > 1)
    return [
        f"{p.tp}{extra}", str(p.pp), str(p.dp), f"{p.micro_batch}×{p.accumulate}", str(p.virtual),
        p.sharding if p.dp > 1 else "–", p.recompute, f"{one.iteration_seconds:.4g}", f"{one.mfu:.1%}",
        f"{one.memory_bytes / GIB:.1f}", f"{one.bubble_fraction:.1%}", f"{one.tokens_per_second_per_gpu:,.0f}",
    ]  # fmt: skip
