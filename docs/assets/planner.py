"""The planner of docs/planner.md. The page runs this file in the browser by Pyodide; a test runs it as it is.

Questions and answers are JSON. A question has strings, as a form has them: `model` (a preset), its changed fields as
`model.NAME`, or `config` (the text of a config.json) and `name`, `machine`, `gpus`, `global_batch`, `tokens` or
`images` of the whole run, `price` of a device hour, `grams_per_kwh`, `base` (fixed settings as a Plan line), `beside`
(lines to compare), and figures of the machine as `machine.NAME`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated

from penstock.boundary.trees import parse_json
from penstock.config.convert import Checked, Count, NotNegative, Positive, Range
from penstock.config.load import load
from penstock.config.machine import Machine, known_machines, load_machine
from penstock.config.model import PRESETS, ModelConfig, option_words, title
from penstock.config.plan import Plan
from penstock.config.theirs.read import model_of
from penstock.errors import PenstockError
from penstock.planner import price as prices
from penstock.planner.cost import RunTerms, costs, run_words, step_words
from penstock.planner.describe import describe
from penstock.planner.explain import BestLayout, bends, why_others_lose, with_base
from penstock.planner.explain import answer as answer_to
from penstock.planner.operators import MATRIX, counted_tokens
from penstock.planner.prediction import room
from penstock.planner.rates import rates_of
from penstock.planner.show import beside, memories, times
from penstock.report.chart import style
from penstock.report.figures import Line, lines
from penstock.report.units import GIB, duration

UNITS = {"memory_bytes": GIB, "link_bytes_per_second": 1e9, "node_bytes_per_second": 1e9}
"""Figures of a machine that the page asks for, in GiB and GB/s."""
SIZES = {
    "vocabulary", "sequence", "decoder_sequence", "image_size", "patch_size", "classes", "width", "depth", "heads",
    "kv_heads", "head_features", "mlp_width", "experts", "experts_per_token",
}  # fmt: skip
"""Fields that a model's size is changed by."""
SHOWN = 5
"""Layouts of an answer."""


@dataclass(frozen=True, kw_only=True)
class Question(Checked):
    """What the form holds."""

    model: ModelConfig = PRESETS["llama3-8b"]
    name: str = ""
    """What the model of a config.json is called."""
    gpus: Annotated[int, Range(1, 1 << 20)] = 8
    global_batch: Count | None = None
    tokens: Positive | None = None
    images: Positive | None = None
    price: NotNegative | None = None
    grams_per_kwh: NotNegative | None = None
    base: str = ""
    """Fixed settings, as a Plan line."""
    beside: str = ""
    """Plan lines to compare with the best, with `|` between them."""


@dataclass(frozen=True, kw_only=True)
class Figure(Checked):
    """A changed figure of the machine."""

    value: Positive = 1.0


def choices() -> str:
    """Models by family, and machines with the figures that can be changed."""
    models: dict[str, list[str]] = {}
    for name, config in PRESETS.items():
        models.setdefault(config.family, []).append(name)
    machines = {name: figures(load_machine(name)) for name in known_machines()}
    return json.dumps({"models": models, "machines": machines, "style": style("#penstock-planner")})


def figures(machine: Machine) -> dict[str, float]:
    """The figures of a machine that the page asks for, in its units."""
    known = {name: (getattr(machine, name) or 0) / unit for name, unit in UNITS.items()}
    return known | {"devices_per_node": machine.devices_per_node}


def sizes(name: str, described: str = "") -> str:
    """The whole numbers that make up the size of a preset, or of the model of a config.json, by their dotted names, and
    what that is `called`; or `refused` with the reason."""

    def every(part: object, prefix: str) -> Iterator[tuple[str, int]]:
        for field in fields(part):  # type: ignore[arg-type]
            value = getattr(part, field.name)
            if is_dataclass(value):
                yield from every(value, f"{prefix}{field.name}.")
            elif field.name in SIZES and isinstance(value, int):
                yield prefix + field.name, value

    try:
        config, called = _described(described) if described.strip() else (PRESETS[name], name)
    except PenstockError as error:
        return json.dumps({"refused": str(error), "sizes": {}, "images": False})
    return json.dumps({"sizes": dict(every(config, "")), "images": config.graph.vision, "called": called})


def _described(text: str) -> tuple[ModelConfig, str]:
    """The model of a config.json, and its name there, or its type."""
    values = parse_json(text, "The config.json")
    model = model_of(values)
    own = str(values.get("_name_or_path", "")).rstrip("/").rpartition("/")[2]
    return model, own or f"your {values.get('model_type', model.family)} model"


def answer(asked: str, width: float = 640.0) -> str:
    """The fastest layouts, and what they take, with figures of a width in pixels; or `refused` with the reason and the
    remedy."""
    try:
        question, machine = _read(asked)
        found = _answer(question, machine, question.gpus)
        others = {line: _answer(question, machine, question.gpus, line) for line in _lines(question.beside)}
    except PenstockError as error:
        return json.dumps({"refused": str(error)})
    model, best = question.model, found.best
    vision = model.graph.vision
    rate = best.samples_per_second * (1 if vision else counted_tokens(model))
    rows = [
        ("parameters", f"{best.parameters / 1e9:.3g} billion"),
        ("one step", duration(best.iteration_seconds, 3)),
        ("images per second" if vision else "tokens per second", f"{rate:,.0f}"),
        ("share of the chips' peak (MFU)", f"{best.mfu:.1%}"),
        ("on the fullest device", f"{best.memory_bytes / GIB:.3g} GiB"),
    ]
    terms = RunTerms(samples=_samples(question), price=question.price, grams_per_kwh=question.grams_per_kwh)
    by_name = costs(best, machine, terms)
    if run := ", ".join(f"{value} {words}" for value, words in run_words(by_name)):
        rows.append(("the whole run", run))
    rows.append(("FLOPs and energy", step_words(by_name)))
    if found.assumed:
        rows.append(("fixed settings", found.assumed))
    if best.interval:
        rows.append(("how sure it is", best.interval.seconds(best.iteration_seconds)))
    limit = room(machine) if machine.memory_bytes else None
    shown = found.result[:SHOWN]
    sections = [times(shown), memories(shown, limit)]
    sides = {
        name: (one.best, costs(one.best, machine, terms))
        for name, one in {"best of all": found, **others}.items()
    }
    table = beside(sides, vision=vision)
    return json.dumps(
        {
            "title": f"{question.name or title(model)} on {best.gpus} {machine.name}, "
            f"{best.global_batch} samples a step",
            "rows": rows,
            "plan": best.plan.line(),
            "command": _command(json.loads(asked), model),
            "why": list(why_others_lose(model, machine, found.result, best)),
            "beside": [
                [cell.value for cell in row] for row in (table.columns, *(cells for _, cells in table.rows))
            ]
            if others
            else [],
            "others": [
                f"{line}: {one.best.plan.line()}. {one.against(best)}" for line, one in others.items()
            ],
            "figures": [
                {"title": section.title, "svg": draw(width=width)}
                for section in sections
                for draw in section.figures
            ]
            + [
                {
                    "title": "Where its products and kernels stand",
                    "svg": roofline(model, machine, best.plan, width),
                }
            ],
            "tried": found.result.tried,
        }
    )


def point(asked: str, gpus: int) -> str:
    """Seconds of a step on another number of devices, and hours and cost of the run; null where nothing fits."""
    try:
        question, machine = _read(asked)
        best = _answer(question, machine, gpus).best
    except PenstockError:
        return "null"
    samples = _samples(question)
    hours = None if samples is None else best.gpu_hours(samples)
    days = None if samples is None else best.days(samples)
    return json.dumps(
        {
            "gpus": gpus, "seconds": best.iteration_seconds, "plan": best.plan.line(), "hours": hours, "days": days,
            "batch": best.global_batch, "parts": best.seconds,
        }
    )  # fmt: skip


def curves(points: str, price: float, width: float = 640.0) -> str:
    """The figures of those points, of a width in pixels: time over devices, and device hours, or cost with a price."""
    known = sorted(json.loads(points), key=lambda one: one["gpus"])
    if len(known) < 2:
        return "[]"
    first, whole = known[0], known[0]["days"] is not None
    time, words = ("days", "days of the whole run") if whole else ("seconds", "seconds of a step")
    marks = [one["gpus"] for one in known]
    tips = [f"{one['gpus']:,} devices: {one[time]:.3g} {time}; {one['plan']}" for one in known]
    ideal = [(n, first[time] * first["gpus"] / n) for n in marks]
    drawn = [
        Line(
            label="fastest layout", points=[(one["gpus"], one[time]) for one in known], tips=tips, bold=True
        ),
        Line(label="perfect scaling", points=ideal),
    ]
    figure = lines(
        drawn, title="Time by devices", x_label="devices", y_label=words, log=True, x_marks=marks, width=width
    )
    words = " ".join(bends([(one["gpus"], one["batch"], one["parts"]) for one in known]))
    made = [{"title": "More devices, less time", "svg": figure, "words": words}]
    if whole:
        unit = price or 1.0
        cost = [(one["gpus"], one["hours"] * unit) for one in known]
        words = "cost of the whole run" if price else "device hours of the whole run"
        figure = lines(
            [Line(label=words, points=cost, tips=[f"{n:,} devices: {value:,.0f}" for n, value in cost], bold=True)],
            title="Cost by devices", x_label="devices", y_label=words, log=True, x_marks=marks, width=width,
        )  # fmt: skip
        made.append({"title": "More devices, more cost", "svg": figure})
    return json.dumps(made)


def roofline(model: ModelConfig, machine: Machine, plan: Plan, width: float) -> str:
    """Operators by FLOPs per byte, under the roof of the machine (Williams, Waterman and Patterson, CACM 2009)."""
    rates = rates_of(machine, plan)
    work = describe(model, plan, machine)
    points: dict[tuple[float, float], list[str]] = {}
    for part in work.blocks[:1]:
        for op in (*part.forward, *part.backward):
            moved = op.read + op.written
            if (op.kind in MATRIX or op.kind == "attention") and moved and op.flops:
                rate = op.flops / prices.seconds(op, rates) / 1e12
                at = float(f"{op.flops / moved:.2g}"), float(f"{rate:.2g}")
                points.setdefault(at, []).append(op.name)
    knee = rates.peak / rates.memory
    ends = [x for x, _ in points]
    low, high = min([knee / 8, *ends]), max([knee * 8, *ends])
    roof = [(x, min(rates.peak, x * rates.memory) / 1e12) for x in (low, knee, high)]
    drawn = [Line(label=f"roof of {machine.name}, {rates.peak_name}", points=roof, bold=True)]
    for (x, y), names in sorted(points.items())[:7]:
        label = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        tip = f"{', '.join(names)}: {x:,.0f} FLOPs a byte, {y:,.0f} TFLOP/s"
        drawn.append(Line(label=label, points=[(x, y)], tips=[tip]))
    return lines(drawn, title="Roofline", x_label="FLOPs per byte", y_label="TFLOP/s", log=True, width=width)


def _read(asked: str) -> tuple[Question, Machine]:
    """The question, and its machine with the figures that were changed."""
    given = {name: value for name, value in json.loads(asked).items() if str(value).strip()}
    if "config" in given:
        given["model"], called = _described(given.pop("config"))
        given.setdefault("name", called)
    machine = load_machine(given.pop("machine", "h100"))
    changed = {
        name: load(Figure, overrides={"value": given.pop(f"machine.{name}")}, origin=f"machine.{name}").value
        for name in (*UNITS, "devices_per_node")
        if f"machine.{name}" in given
    }
    if changed:
        own = {name: value * UNITS.get(name, 1) for name, value in changed.items()}
        if "devices_per_node" in own:
            own["devices_per_node"] = int(own["devices_per_node"])
        machine = replace(machine, name=f"{machine.name} (changed)", **own)
    return load(Question, overrides=given, origin="the form"), machine


def _answer(question: Question, machine: Machine, gpus: int, line: str = "") -> BestLayout:
    """The best layout with the fixed settings, and those of a line that is compared with it."""
    asked = with_base(question.base, line) or None
    return answer_to(
        question.model, machine, gpus, asked, global_batch=question.global_batch, name=question.name
    )


def _lines(text: str) -> list[str]:
    """Plan lines that `|` separates."""
    return [line.strip() for line in text.split("|") if line.strip()]


def _samples(question: Question) -> float | None:
    """Samples of the whole run."""
    if question.tokens is not None:
        return question.tokens / counted_tokens(question.model)
    return question.images


def _command(given: dict[str, str], model: ModelConfig) -> str:
    """The commands that ask the same in a terminal; figures of a changed machine have none."""
    words = [
        f"--{name.replace('_', '-')} {given[name]}"
        for name in ("machine", "gpus", "global_batch", "tokens", "images", "price", "grams_per_kwh")
        if str(given.get(name, "")).strip()
    ]
    if given.get("base"):
        words.append(f"--base '{given['base']}'")
    command = " ".join(["penstock plan", *option_words(model), *words])
    return f"{command}\n{command} --explain '{given['beside']}'" if given.get("beside") else command
