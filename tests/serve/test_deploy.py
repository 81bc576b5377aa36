"""`penstock deploy`: which layout serves in time, why the others do not, and the command that starts it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.sweeps import sweep
from helpers.toy import TOY
from penstock.cli import main
from penstock.config.machine import GemmSample, load_machine, save_machine
from penstock.config.model import PRESETS, ModelConfig
from penstock.errors import ConfigError, ExitCode
from penstock.planner.loads import LoadRecord
from penstock.planner.serve import (
    Passes,
    Serving,
    StepCosts,
    predict_inference,
    predicted_costs,
    weights_bytes,
)
from penstock.serve.deploy import Layout, explore, server_command
from penstock.serve.settings import DeployConfig
from penstock.serve.traffic import requests_of

A100 = load_machine("a100-80g")
LLAMA, BERT = PRESETS["llama3-8b"], PRESETS["bert-tiny"]


def found(model: ModelConfig, requests: str, machine: str = "a100-80g", **asked: object) -> object:
    given = DeployConfig(model=model, machine=machine, **asked)  # type: ignore[arg-type]
    return explore(model, load_machine(machine), requests_of(requests, asked.get("count")), given)


def test_more_traffic_takes_more_devices_and_a_tighter_limit_splits_layers() -> None:
    slow = found(LLAMA, "rate=2 in=512 out=128", p95_latency="10s", count=200)
    busy = found(LLAMA, "rate=60 in=512 out=128", p95_latency="4s", gpus="1..8", count=500)
    fast = found(LLAMA, "rate=2 in=512 out=128", p95_latency="1s", count=200)
    assert (slow.choice.gpus, slow.choice.type) == (1, "bf16")
    assert busy.choice.gpus > 2
    assert fast.choice.tp > 1
    for one in (slow, busy, fast):
        assert one.layouts[0] is one.choice
        assert not one.choice.why
        assert all(layout.why for layout in one.layouts[1:])
        assert one.choice.memory_bytes <= A100.memory_bytes


def test_the_forecast_is_of_the_server_whose_script_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our own records its steps where that is legal and in time; without weights no script is written."""
    asked: dict[str, Any] = {"gpus": "1", "count": 20}
    made = {}
    cases = ((None, "h100", "device"), ("folder", "h100", "recorded"), ("folder", "tpu-v5p", "device"))
    for weights, machine, steps in cases:
        result = found(PRESETS["gpt2"], "rate=2 in=64 out=16", machine, weights=weights, **asked)
        made[weights, machine] = result.choice
        assert result.choice.steps == steps
    each = {key: one.served.per_token.p50 for key, one in made.items()}
    assert 1.3 < each["folder", "h100"] / each[None, "h100"] < 4, "Python chooses the tokens"
    words = ["deploy", "gpt2", "--gpus", "1", "--requests", "rate=2 in=64 out=16", "--count", "20"]
    recorded = ["--weights", "folder", "--output", str(tmp_path)]
    for more, said in ((recorded, "records its steps (--compile"), ([], "only the device's work takes")):
        assert main([*words, *more]) == 0
        assert said in capsys.readouterr().out
    script = (tmp_path / "penstock.sh").read_text()
    assert "--compile whole --cache slots" in script
    assert "--tokens" not in script


def test_steps_are_launched_one_by_one_where_none_can_be_recorded() -> None:
    """Over several devices, of experts, in fp8; and where caches of recorded steps leave room for too few texts."""
    traffic, machine = requests_of("rate=2 in=64 out=16", 20), load_machine("h100")
    mixture = replace(PRESETS["mixtral-tiny"], sequence=128)
    cases: list[tuple[ModelConfig, str, Any]] = [
        (PRESETS["gpt2"], "2", ("auto",)), (mixture, "1", ("auto",)), (PRESETS["gpt2"], "1", ("fp8",)),
    ]  # fmt: skip
    for model, gpus, types in cases:
        config = DeployConfig(model=model, weights="folder", gpus=gpus, types=types)
        layouts = explore(model, machine, traffic, config).layouts
        eager = [one for one in layouts if one.tp > 1 or one.type == "fp8" or model is mixture]
        assert eager
        assert {one.steps for one in eager} == {"launched"}
        served = next(one for one in eager if one.type in ("bf16", "fp8"))
        script = server_command(config, machine, served)
        assert "--compile" not in script
        assert "--tokens" in script
    small = replace(machine, memory_bytes=2**30 + weights_bytes(PRESETS["gpt2"], Serving()) + 1e7)
    config = DeployConfig(model=PRESETS["gpt2"], weights="folder", gpus="1")
    choice = explore(PRESETS["gpt2"], small, traffic, config).choice
    assert choice is not None
    assert choice.steps == "launched"


def test_what_does_not_fit_says_what_it_needs() -> None:
    large = found(PRESETS["llama3-70b"], "rate=1 in=512 out=128", p95_latency="30s", count=200)
    assert large.choice.tp >= 2
    assert any(
        "GiB a device, which has" in one.why for one in large.layouts if one.tp == 1 and one.type == "bf16"
    )


def test_a_pipeline_is_taken_only_where_a_node_is_too_small() -> None:
    one = found(PRESETS["llama3-405b"], "rate=0.2 in=512 out=64", gpus="1..32", p95_latency="60s", count=200)
    assert {layout.pp for layout in one.layouts if layout.type == "bf16"} > {1}
    assert one.choice.tp == 8
    assert one.choice.pp > 1


def test_types_that_change_results_are_offered_and_not_chosen() -> None:
    one = found(PRESETS["llama3-70b"], "rate=1 in=512 out=128", p95_latency="30s", count=200)
    assert one.choice.type == "bf16"
    assert any("changes results" in layout.why for layout in one.layouts if layout.type == "int4")
    named = found(
        PRESETS["llama3-70b"], "rate=1 in=512 out=128", p95_latency="30s", types=("auto", "int4"), count=200
    )
    assert named.choice.type == "int4"
    assert named.choice.gpus < one.choice.gpus


def test_fp8_is_offered_by_machines_that_have_it_and_told_to_servers() -> None:
    assert not any(one.type == "fp8" for one in found(LLAMA, "rate=2 in=512 out=128", count=50).layouts)
    offered = found(LLAMA, "rate=2 in=512 out=128", "h100", count=50)
    assert offered.choice.type == "bf16"
    assert any("changes results" in one.why for one in offered.layouts if one.type == "fp8")
    asked = DeployConfig(model=LLAMA, machine="h100", weights="folder")
    best = found(LLAMA, "rate=2 in=512 out=128", "h100", types=("fp8",), count=50).choice
    assert best.type == "fp8"
    command = " ".join(server_command(asked, load_machine("h100"), best))
    assert "--dtype bf16" in command
    assert "--weights fp8" in command
    assert not server_command(asked, load_machine("h100"), replace(best, tp=2)), "ranks would round apart"


def test_experts_are_placed_by_their_loads_and_the_busiest_device_is_predicted(tmp_path: Path) -> None:
    model = PRESETS["mixtral-8x7b"]
    loads = (600, 90, 80, 70, 60, 50, 40, 30)
    names = tuple(f"decoder.blocks.{n}.mlp" for n in range(32))
    record = LoadRecord(names, (), ((loads,),) * 32)
    (tmp_path / "loads.json").write_text(record.to_json())
    asked: dict[str, Any] = {"gpus": "4", "types": ("bf16",), "count": 60}
    requests = "rate=2 in=512 out=64"

    def split(**more: str) -> dict[int, Layout]:
        layouts = found(model, requests, "h100", **asked, **more).layouts  # type: ignore[attr-defined]
        return {one.spare: one for one in layouts if (one.tp, one.type) == (4, "bf16")}

    even, by = split(), split(loads=str(tmp_path / "loads.json"))
    assert list(even) == [0]
    assert even[0].uneven == 1.0
    (spare,) = set(by) - {0}
    # One of four devices has the expert with 600 of 1,020 visits, and another expert at least.
    assert by[0].uneven == pytest.approx(630 * 4 / 1020)
    assert 1.0 <= by[spare].uneven <= 1.05
    assert 0 < spare <= 8
    evenly, unevenly, spared = (one.served.per_token.p50 for one in (even[0], by[0], by[spare]))
    assert max(evenly, spared) < unevenly
    expert = 3 * 4096 * 14336
    more = by[spare].memory_bytes - by[0].memory_bytes
    assert by[spare].slots == by[0].slots
    assert more == pytest.approx(spare * 32 * expert * 2 / 4, rel=0.05)
    config = DeployConfig(model=model, machine="h100", weights="folder", loads="runs/moe")
    command = " ".join(server_command(config, load_machine("h100"), by[spare]))
    assert f"--tp 4 --ep 4 --loads runs/moe --spare_experts {spare}" in command
    with pytest.raises(ConfigError, match="the model has none; leave loads out"):
        found(LLAMA, requests, loads=str(tmp_path / "loads.json"))
    other = LoadRecord(("a",), (), (((1, 1),),))
    (tmp_path / "loads.json").write_text(other.to_json())
    with pytest.raises(ConfigError, match=r"mixtures of \[2\] experts"):
        split(loads=str(tmp_path / "loads.json"))


def test_nothing_in_time_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["deploy", "llama3-8b", "--machine", "a100-80g", "--gpus", "1", "--count", "100"]
    code = main([*words, "--requests", "rate=50 in=512 out=128", "--p95-latency", "1s"])
    assert code == ExitCode.OUT_OF_MEMORY
    said = capsys.readouterr().out
    assert "No layout on 1 a100-80g is in time" in said
    assert "even alone" in said


def test_the_answer_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "deploy", "llama3-8b", "--machine", "h100", "--requests", "rate=4 in=512 out=128", "--p95-latency", "1s",
    ]  # fmt: skip
    assert main([*words, "--price", "3", "--count", "200", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    best = told["layouts"][0]
    assert told["found"]
    assert best["served"]["latency"]["p95"] <= 1.0
    assert best["device_hours"] == pytest.approx(
        best["gpus"] * 1e6 / best["served"]["tokens_per_second"] / 3600
    )


def test_a_pipe_gets_every_column_in_one_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "deploy", "gpt2", "--gpus", "1", "--requests", "rate=9 in=20 out=5", "--count", "20", "--price", "2",
    ]  # fmt: skip
    assert main(words) == 0
    heads, first, second = capsys.readouterr().out.splitlines()[1:4]
    assert heads.split()[-6:] == ["tokens/s", "GiB", "per", "million", "why", "not"]
    assert re.search(r" [\d.]+ +US\$ [\d.]+ *$", first)
    assert re.search(r" [\d.]+ +US\$ [\d.]+ +\S.* changes results *$", second)


@pytest.mark.parametrize("name", sweep(
    ["gpt2", "mixtral-8x7b", "t5-small", "marian-base", "bert-base"], ["gpt2", "mixtral-8x7b", "bert-base"]
))  # fmt: skip
def test_every_family_of_text_is_deployed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    requests = "rate=3 in=20..100 out=5..30"
    assert main(["deploy", name, "--machine", "h100", "--requests", requests, "--count", "60"]) == 0
    assert "choice: bf16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "needs a model"), (["gpt2", "--gpus", "8..1"], "gpus is '8..1'"),
    (["gpt2", "--p95-latency", "soon"], "p95_latency is 'soon'"),
    (["gpt2", "--p95-latency", "0s"], "p95_latency is '0s'"),
    (["gpt2", "--requests", "rate=1 in=9999 out=1"], "has 1,024 positions"), (["vit-b16"], "for text models"),
    (["gpt2", "--types", "bf16", "--machine", "v100"], "types names bf16"),
    (["gpt2", "--types", "fp8", "--machine", "a100-80g"], "types names fp8"),
    (["gpt2", "--gpus", "3", "--requests", "none.jsonl"], "does not exist"), (["no-such/folder"], "no-such/folder"),
    (["gpt2", "--measure"], "--measure was removed; start the script that --output writes")], ids=str,
)  # fmt: skip
def test_mistakes_are_told(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", *words]) in (ExitCode.CONFIG, ExitCode.DATA, ExitCode.ENVIRONMENT)
    assert said in capsys.readouterr().err


def test_a_cpu_is_deployed_by_its_rates_of_layers_in_int8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = GemmSample(dtype="int8", m=8, n=768, k=768, flops_per_second=5e11, form="stored")
    known = replace(TOY, gemm=(sample,))
    words = ["--gpus", "1", "--requests", "rate=0.1 in=64 out=32", "--count", "20", "--types", "fp32,int8"]
    told = []
    for number, machine in enumerate((TOY, known)):
        file = str(save_machine(machine, tmp_path / f"{number}.json"))
        assert main(["deploy", "gpt2", "--machine", file, *words]) == 0
        told.append(capsys.readouterr().out)
    assert (
        "note: toy has no rate of inference with weights=int8, so the rate of products of plain weights"
        in told[0]
    )
    assert "weights=int8," not in told[1]
    assert "choice: int8" in told[1]


def test_the_table_of_steps_is_the_prediction_at_its_points() -> None:
    serving = Serving(batch=8, prompt=256, generated=2)
    costs = predicted_costs(LLAMA, A100, serving, slots=32, longest=1024)
    one = predict_inference(LLAMA, A100, replace(serving, batch=1))
    assert costs.prefill(256) == pytest.approx(one.prefill_seconds)
    eight = predict_inference(LLAMA, A100, serving)
    assert costs.decode(8, 256) == pytest.approx(eight.decode_seconds_per_token, rel=0.02)
    assert costs.decode(6, 256) < costs.decode(8, 256) < costs.decode(8, 900)


def test_between_points_costs_are_linear_and_never_below_none() -> None:
    costs = StepCosts(((10.0, 1.0), (20.0, 3.0)), ((1.0, 1.0, 0.1), (3.0, 2.0, 0.3)))
    assert [costs.prefill(n) for n in (1, 10, 15, 30)] == [1.0, 1.0, 2.0, 5.0]
    assert costs.decode(2, 10) == pytest.approx(1.5 + 2.0)


def test_an_encoder_decoder_reads_its_source_once() -> None:
    marian = PRESETS["marian-base"]
    passes = Passes(marian, A100, Serving())
    assert passes.prefill(512, 8) > passes.prefill(16, 8)
    assert passes.decode(8, 512) < passes.prefill(512, 8)
    with pytest.raises(ConfigError, match="tp=7 cannot split"):
        Passes(marian, A100, Serving(tp=7))


@pytest.mark.parametrize(
    ("model", "tp", "pp", "written"),
    [(LLAMA, 1, 1, ""), (LLAMA, 8, 1, "--tp 8"), (LLAMA, 16, 1, None), (LLAMA, 2, 2, None), (BERT, 2, 1, None)],
)  # fmt: skip
def test_our_server_is_started_where_it_can_split_the_layers(
    model: ModelConfig, tp: int, pp: int, written: str | None
) -> None:
    layout = Layout(
        type="bf16", tp=tp, pp=pp, replicas=1, slots=8, memory_bytes=1e9, cache_tokens=4096, context=512
    )
    command = server_command(DeployConfig(model=model, weights="folder"), A100, layout)
    assert bool(command) == (written is not None)
    if written is not None:
        assert written in " ".join(command)
        assert ("--tp" in command) == (tp > 1)
