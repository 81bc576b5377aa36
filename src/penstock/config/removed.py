"""Settings, values and commands of earlier versions that were removed, and their replacements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MEASURE = (
    "start the script that --output writes, and send it requests with a client of OpenAI's API that measures, or run "
    "benchmarks/deploy_measured.py in a clone of the repository, which sets a server beside its simulation"
)
REMOVED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "Plan.master": (
        "leave it out: precision=O2 keeps an fp32 copy of its weights. A run with it goes on from its weights, with "
        "--init_from RUN/export or what penstock checkpoint export writes",
        ("copy",),
    ),
    "Recipe.teacher_beams": (
        "let penstock generate write the teacher's translations, and train on them (docs/how-to/distil.md)",
        (0,),
    ),
    "Recipe.teacher_cache": ("leave it out: the teacher computes its outputs for each batch", (None,)),
    "Decoding.beam_groups": ("draw several texts with temperature and best, which differ too", (1,)),
    "Decoding.diversity_penalty": (
        "draw several texts with temperature and best, which differ too",
        (0.0, 0),
    ),
    "Decoding.coverage_penalty": (
        "use beams with length_penalty, which keeps texts from ending early",
        (0.0, 0),
    ),
    "Decoding.contrastive": ("use temperature with top_p, or repetition_penalty", (0.0, 0)),
    "DeployConfig.measure": (_MEASURE, (False,)),
    "CompressConfig.trim": (
        "prune and quantise the model as it is, or trim its vocabulary before, with a tool of the tokenizer's",
        (False,),
    ),
    "Distil.beams": (
        "let penstock generate write the original's translations, and give them as data (docs/how-to/distil.md)",
        (0,),
    ),
}
"""For each class and setting, what to do instead, and the values that ask for nothing special: these are still
accepted, because a run's folder has every setting."""
REMOVED_VALUES: dict[str, dict[str, str]] = {
    "Plan.products": {
        "int8_forward": "use products=int8, which has gradients of inputs in int8 too",
        "int8_backward": "use products=int8, or int8_all",
    },
    "Stack.router": {
        "noisy": "use softmax, with router_jitter where choices are to differ in training",
        "expert_choice": "use softmax, whose weights have the same shapes, with capacity to bound an expert's visits",
    },
}
"""For each class and setting, removed values, and what to do instead."""

COMMANDS = {
    "demo": "run `make demo`, or python examples/demo.py, in a clone of the repository",
    "push": "upload a run's export with `hf upload OWNER/NAME RUN/export`, which is huggingface_hub's own command",
}
"""Removed commands, and what to do instead."""
_INSTEAD = (
    "gradient_histogram and recommend say what fp16 loses and which scale saves it, and OverflowTrace where an "
    "overflow begins (docs/how-to/loss-scale.md)"
)
INSPECTION = {"report": _INSTEAD, "PrecisionReport": _INSTEAD}
"""Removed names of `penstock.precision`, and what to do instead."""
OPTIONS = {
    "deploy measure": _MEASURE,
    "doctor thorough": "leave it out: the doctor tries the compilers, and the first run with plan.compile compiles",
    "plan toml": "use --run, which prints the command that trains with the best Plan, or --json, which has its line",
    "train trace": "use --profile, whose trace Perfetto opens, or penstock plan, which draws the pipeline as predicted",
    "experts uneven": "use more slots, which even shares balance too: --target 1.05 finds the fewest that are enough",
}
"""Removed options of commands, and what to do instead."""

GONE_SOURCES = {
    "emoji": " emoji: was removed; draw them with examples/emoji_captions.py, in a clone of the repository, and use "
    "captions:FOLDER."
}
"""Removed kinds of data.source, and what to do instead."""


def removed_option(command: str, word: str) -> str | None:
    """The problem of a command's option (without its dashes) if it or its setting was removed; None for others."""
    if instead := OPTIONS.get(f"{command} {word}"):
        return f"--{word} was removed; {instead}."
    for key, (instead, _) in REMOVED.items():
        section, _, name = key.partition(".")
        alone = section in ("Decoding", "CompressConfig")
        if word == f"{section.lower()}.{name}" or (alone and word == name):
            return f"--{word} was removed; {instead}."
    return None


def removal(cls: type, name: str, value: Any, path: str) -> str | None:
    """The problem of a setting or value that was removed; `path` is the setting's name in messages. Empty if leaving
    the setting out means the same, None if it was not removed."""
    keys, text = [f"{base.__name__}.{name}" for base in cls.__mro__], str(value)
    key = next((each for each in keys if each in REMOVED or each in REMOVED_VALUES), "")
    if key in REMOVED:
        instead, same = REMOVED[key]
        return (
            ""
            if text.lower() in [str(each).lower() for each in same]
            else f"{path}={text} was removed; {instead}."
        )
    instead = REMOVED_VALUES.get(key, {}).get(text, "")
    return f"{path}={text} was removed; {instead}." if instead else None


def with_moved(cls: type, nested: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Values for the fields of `cls`, with moved fields (`cls.MOVED`) under their present names."""
    for before, now in getattr(cls, "MOVED", {}).items():
        (old, _, name), (new, _, today) = before.partition("."), now.partition(".")
        for part in nested.get(old, []):
            if isinstance(part, dict) and name in part:
                nested.setdefault(new, []).append({today: part.pop(name)})
    return nested


def without_removed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a stored run without removed ones, for callers that need only its model and weights."""
    remaining = dict(stored)
    for key in {**REMOVED, **REMOVED_VALUES}:
        section, name = key[0].lower() + key[1:].partition(".")[0], key.partition(".")[2]
        values = remaining.get(section)
        if isinstance(values, Mapping) and (key in REMOVED or str(values.get(name)) in REMOVED_VALUES[key]):
            remaining[section] = {other: value for other, value in values.items() if other != name}
    return remaining
