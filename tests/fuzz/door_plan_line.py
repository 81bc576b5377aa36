"""The line of a Plan, as users type it and as files hold it, up to what it costs and whether it may run."""

from __future__ import annotations

from hypothesis import strategies as st

from fuzz.door import Case, Door
from penstock.config import rules
from penstock.config.kinds import field_types
from penstock.config.machine import load_machine
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.planner.prediction import predict

_WORDS = (
    "0", "1", "2", "3", "7", "8", "96", "-1", "0.5", "1.25", "nan", "inf", "1e400", "1e18", "2147483647", "2147483648",
    "9" * 5000, "", "none", "true", "false", "auto", "plain", "O1", "O2", "bf16", "fused", "fsdp", "hsdp",
    "interleaved", "rowwise", "full", "operators", "\x1b[2J", "a\0b", "\u202e",
)  # fmt: skip
_MODELS = ("vit-b16", "llama3-8b", "mixtral-8x7b", "t5-large")


def _seeds() -> dict[str, bytes]:
    return {
        "vit-b16": b"precision=O1 optimizer=fused micro_batch=32 compile=blocks",
        "llama3-8b": b"precision=O2 dp=8 sharding=fsdp tp=2 sp=true recompute=operators recompute_every=2.5",
        "mixtral-8x7b": b"precision=O2 dp=8 ep=8 sharding=zero1 micro_batch=1",
        "t5-large": b"precision=O2 pp=2 accumulate=4 optimizer=contiguous",
    }


def _enter(name: str, data: bytes) -> None:
    plan = Plan.parse(data.decode("utf-8", "surrogateescape"))
    assert Plan.parse(plan.line()) == plan
    assert Plan.from_toml(plan.to_toml()) == plan
    model, machine = PRESETS[name], load_machine("h100")
    predict(model, machine, plan)
    rules.problems(plan, model, machine, run=True)


def _made() -> st.SearchStrategy[Case]:
    names = st.sampled_from((*field_types(Plan), "layout", "", "plan", "baseline"))
    words = st.one_of(st.sampled_from(_WORDS), st.integers(1, 64).map(str), st.text(max_size=8))
    lines = st.lists(st.builds("{}={}".format, names, words), max_size=6).map(" ".join)
    return st.tuples(st.sampled_from(_MODELS), lines.map(lambda line: line.encode(errors="surrogatepass")))


DOOR = Door(
    seeds=_seeds, enter=_enter, made=_made, tokens=tuple(f" {name}=".encode() for name in field_types(Plan))
)
