"""FLOPs, energy, money and CO₂ of a step and of a whole run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.config.machine import Machine
from penstock.planner.prediction import Prediction
from penstock.report.units import duration, energy, mass, money, rounded, scientific


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTerms:
    """Length of a run, and prices; None if not set."""

    samples: float | None = None
    price: float | None = None
    """Price of one device hour."""
    grams_per_kwh: float | None = None
    """Grams of CO₂ emitted per kilowatt hour."""


def costs(one: Prediction, machine: Machine, terms: RunTerms) -> dict[str, float]:
    """Figures of one step, and of the whole run where its length is known, with units in the names. Energy assumes the
    devices' rated power, and is absent where that is unknown."""
    model = one.model_flops_per_second_per_gpu * one.gpus * one.iteration_seconds
    by_name = {"step_model_flops": model, "step_hardware_flops": model * one.hfu / one.mfu}
    watts = one.gpus * (machine.power_watts or 0.0)
    if watts:
        by_name["step_watt_hours"] = watts * one.iteration_seconds / 3600
    if terms.samples is None:
        return by_name
    hours, steps = one.gpu_hours(terms.samples), terms.samples / one.global_batch
    by_name |= {"days": one.days(terms.samples), "gpu_hours": hours}
    by_name |= {name: steps * by_name[f"step_{name}"] for name in ("model_flops", "hardware_flops")}
    if watts:
        by_name["energy_megawatt_hours"] = steps * by_name["step_watt_hours"] / 1e6
        if terms.grams_per_kwh is not None:
            by_name["co2_kilograms"] = by_name["energy_megawatt_hours"] * terms.grams_per_kwh
    if terms.price is not None:
        by_name["cost"] = hours * terms.price
    return by_name


def step_words(by_name: Mapping[str, float]) -> str:
    """FLOPs and energy of a step, and FLOPs of the whole run, in one sentence."""
    flops = [scientific(by_name[f"step_{kind}_flops"]) for kind in ("model", "hardware")]
    again = f" ({flops[1]} with what is computed again)" if flops[1] != flops[0] else ""
    words = f"FLOPs: {flops[0]} a step{again}"
    if "model_flops" in by_name:
        whole = [scientific(by_name[f"{kind}_flops"]) for kind in ("model", "hardware")]
        words += f", {whole[0]} in all" + (f" ({whole[1]})" if whole[1] != whole[0] else "")
    if drawn := watt_hours(by_name):
        words += f"; {drawn} a step at rated power"
    return f"{words}."


def watt_hours(by_name: Mapping[str, float]) -> str:
    """Energy of a step; empty where the devices' power is unknown."""
    return energy(by_name["step_watt_hours"]) if "step_watt_hours" in by_name else ""


def run_words(by_name: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Figures of the whole run in readable units, each with its caption."""
    if "days" in by_name:
        yield duration(by_name["days"] * 86400), "of training"
        yield rounded(by_name["gpu_hours"]), "GPU hours"
    if "energy_megawatt_hours" in by_name:
        yield energy(by_name["energy_megawatt_hours"] * 1e6), "at rated power"
    if "co2_kilograms" in by_name:
        yield mass(by_name["co2_kilograms"] * 1e3), "of CO₂"
    if "cost" in by_name:
        yield money(by_name["cost"]), "to pay"
