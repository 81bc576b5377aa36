"""Files of settings for `--config`: TOML, YAML and JSON, of every verb that takes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.door import Case, Door
from fuzz.mutate import altered_tree
from fuzz.text import as_json, as_toml
from penstock.cli.plan_config import PlanConfig
from penstock.cli.scale import ScaleConfig
from penstock.config import rules
from penstock.config.load import dump_toml, load, to_dict
from penstock.config.recipes import load_run
from penstock.config.run import RunConfig
from penstock.ladder.settings import LadderConfig

_CONFIGS: dict[str, Any] = {
    "run": load_run(overrides={"model": "vit-digits"}),
    "ladder": LadderConfig(rungs=("fused",), batch=4),
    "plan": PlanConfig(gpus=16),
    "scale": ScaleConfig(batches=2),
}
_YAML = b"""\
model: {preset: vit-s16, image_size: 224}
recipe: &recipe
  lr: 1e-3
  clip_norm: none
  augment: {flip: 0.5}
plan: precision=O1 optimizer=fused
data.source: digits
seed: 1
"""


def _seeds() -> dict[str, bytes]:
    trees = {name: to_dict(config) for name, config in _CONFIGS.items()}
    return {
        "run.toml": dump_toml(_CONFIGS["run"]).encode(),
        "run.yaml": _YAML,
        **{f"{name}.json": as_json(tree) for name, tree in trees.items()},
        "ladder.toml": b'model = "vit-digits"\nrounds = 3\n[data]\nsource = "digits"\n',
        "plan.yml": b"model: gpt2\ngpus: 8\nmodel.sequence: 2048\n",
    }


def _enter(name: str, data: bytes) -> None:
    Path(name).write_bytes(data)
    stem = name.partition(".")[0]
    if stem == "run":
        run: RunConfig = load_run(file=name)
        assert load(RunConfig, file=_written(dump_toml(run))) == run, "what is stored runs the same again"
        rules.require(run.plan, run.model, run=True)
    else:
        load(type(_CONFIGS[stem]), file=name)


def _written(text: str) -> str:
    Path("again.toml").write_text(text, encoding="utf-8")
    return "again.toml"


def _made() -> st.SearchStrategy[Case]:
    trees = {name: to_dict(config) for name, config in _CONFIGS.items()}
    ways = [(f"{name}.json", tree, as_json) for name, tree in trees.items()]
    ways += [("run.toml", trees["run"], as_toml), ("ladder.toml", trees["ladder"], as_toml)]
    ways += [("run.yaml", trees["run"], as_json)]  # nearly all JSON is YAML too
    return st.one_of(
        altered_tree(tree).map(lambda tree, name=name, write=write: (name, write(tree)))
        for name, tree, write in ways
    )


DOOR = Door(
    seeds=_seeds,
    enter=_enter,
    made=_made,
    tokens=(b"[", b"{", b"&a ", b"*a", b"<<: *recipe", b"!!int ", b"? ", b"[[a]]\n", b"a.b.c = 1\n", b"nan", b"0x",
            b'"""', b"\x1b[2J", b"\\u0000", b"---\n", b"2001-12-14", b"1:30"),
)  # fmt: skip
