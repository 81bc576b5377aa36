"""lm-evaluation-harness scores a model behind the server as it scores the same model by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.models_of_strangers import gpt2
from helpers.served import served

TASK = """\
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{q}}}}"
doc_to_target: a
doc_to_choice: choices
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
DOCUMENTS = [
    {"q": "The sea runs", "choices": [" to the river.", " to the river", " END.", " END"], "a": 0},
    {"q": "hello world", "choices": [" stop.", " stop", " main().", " main()"], "a": 2},
    {"q": "The river", "choices": [" runs.", " runs", " café.", " café"], "a": 1},
]


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_a_local_task_gets_the_scores_of_the_harness_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lm_eval.tasks import TaskManager

    model = gpt2(tmp_path / "model", ends_after="The river")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in DOCUMENTS))
    (tmp_path / "mine.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def evaluated(kind: str, **settings: Any) -> Any:
        found = harness.simple_evaluate(
            model=kind, model_args=settings, tasks=["mine"], task_manager=tasks, bootstrap_iters=0
        )
        return [[log[0] for log in one["filtered_resps"]] for one in found["samples"]["mine"]], found[
            "results"
        ]

    own, own_results = evaluated("hf", pretrained=str(model), device="cpu", dtype="float32")
    with served(model, opener="penstock.serve.worker:opened") as running:
        over_http, results = evaluated(
            "local-completions", base_url=f"http://127.0.0.1:{running.port}/v1/completions", model="model",
            tokenizer=str(model), tokenizer_backend="huggingface", num_concurrent=1,
        )  # fmt: skip
    for row, expected in zip(over_http, own, strict=True):
        assert row == pytest.approx(expected, abs=1e-3)
    assert results["mine"]["acc,none"] == own_results["mine"]["acc,none"]
    assert results["mine"]["acc_norm,none"] == own_results["mine"]["acc_norm,none"]
