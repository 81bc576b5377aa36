"""Options that nobody means are answered with a sentence and code 2, before anything is built or read."""

from __future__ import annotations

import pytest

from penstock.cli import main
from penstock.errors import ExitCode


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "--budget-gpu-hours", "1e308"], "budget_gpu_hours is 1e+308, but must be at most 1e+30."),
        (["plan", "--compute", "nan"], "compute is nan, but must be above 0 and finite."),
        (["plan", "gpt2", "--gpus", str(10**30)], "must have at most 64 bits."),
        (["plan", "gpt2", "--gpus", "9" * 5000], "must be a whole number or none."),
        (["plan", "gpt2", "--machine", " "], "machine is ' ', but must not be empty"),
        (["plan", "gpt2", "--explain", "dp=0"], "plan.dp is 0, but must be at least 1."),
        (["plan", *["--json"] * 20_000], "has 20,001 words, and at most 1,000 are read"),
        (["plan", *["x" * 50] * 900], "Unused Tokens"),
        (["plan", "gpt\x1b[2J"], "has the control character '\\x1b'"),
        (["train", "--init_from", ""], "init_from is '', but must not be empty"),
        (["train", "--output", ""], "output is '', but must not be empty"),
        (
            ["train", "--data", ""],
            "data.source is '', but must be auto, digits, captions, stdlib, numbers, names, emoji:FONT,NAMES, ",
        ),
        (["train", "--seed", "-1"], "seed is -1, but must be at least 0."),
        (["train", "--seed", str(2**64)], "but must have at most 64 bits."),
        (["train", "--device", "cuda:99999999999999"], "but must be auto, cpu, cuda or cuda:N."),
        (["train", "--model.image_size", "1e18"], "but must be at most 65,536."),
        (["train", "--model.norm_eps", "0"], "model.norm_eps is 0.0, but must be above 0."),
        (["train", "--model.norm_eps", "1e-300"], "must be 0, or at least 1e-30 in size."),
        (["train", "--recipe.lr", "1e400"], "recipe.lr is inf, but must be above 0 and finite."),
        (["train", "--recipe.beta1", "1"], "recipe.beta1 is 1.0, but must be at least 0 and below 1."),
        (["ladder", "--rungs", ""], "rungs is '', but must name something; write none for an empty list."),
        (["ladder", ":"], "factory is ':', but must be package.module:function."),
        (["scale", "..a:b"], "factory is '..a:b', but must be package.module:function."),
        (["pack", "a", "b", "--threads", "-1"], "threads is -1, but must be at least 0."),
        (["run", "--option", "level=1", "x.py"], "--option 'level=1' is not a setting"),
        (["launch", "--hang-seconds", "nan", "--", "vit-digits"], "hang_seconds is nan"),
        (["launch", "--procs", "9" * 30, "--", "vit-digits"], "must have at most 64 bits."),
        (["launch", "--", "vit-digits", "--\x1b"], "has the control character '\\x1b'"),
        (["checkpoint", "export", "a", "b", "--shard-gb", "nan"], "--shard-gb is nan, but must be above 0"),
    ],
    ids=lambda given: (
        " ".join(given)[:50].encode("unicode_escape").decode() if isinstance(given, list) else ""
    ),
)
def test_nonsense_is_answered(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == ExitCode.CONFIG
    told = capsys.readouterr().err
    assert said in told
    assert len(told) < 5000
