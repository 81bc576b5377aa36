"""Weights by a name on the hub: out of the cache, and a message with the remedy where they are in no cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.boundary.hub import local_weights
from penstock.config.model import ViTConfig
from penstock.errors import ConfigError, EnvironmentProblem
from penstock.models import create
from penstock.models.convert import from_pretrained, load_weights

NAME = "somebody/vit-tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_cache(home: Path, *, safetensors: bool = True) -> Path:
    """A cache as huggingface_hub lays it out, with a randomly initialised ViT that transformers has written."""
    transformers = pytest.importorskip("transformers")
    folder = home / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=16, patch_size=4, num_channels=1, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, num_labels=7,
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(snapshot)
    if not safetensors:
        (snapshot / "model.safetensors").unlink()
    return snapshot


SCRIPT = """
import sys, time, torch
from penstock.config.model import ViTConfig
from penstock.models import create
from penstock.models.convert import from_pretrained, load_weights
started = time.monotonic()
model = create(ViTConfig(image_size=8, patch_size=4, channels=1, width=32, depth=2, heads=2, mlp_width=64, classes=10))
found = load_weights(model, "somebody/vit-tiny", new_head=True)
print(found.names, found.resized_from, ",".join(found.drawn))
print(from_pretrained("somebody/vit-tiny@main").config.classes)
"""

REFUSED = """
import time
from penstock.errors import EnvironmentProblem
from penstock.boundary.hub import local_weights
started = time.process_time()
try:
    local_weights("somebody/other")
except EnvironmentProblem as error:
    print(error)
print(time.process_time() - started)
"""


def refused_at_once(said: str, seconds: str, cache: Path) -> None:
    """Hold that a name that is in no cache ends in a sentence with the remedy."""
    assert said.startswith(
        "There is no folder somebody/other. As a name on the Hugging Face hub it is not in the cache "
        f"({cache}/hub), and cannot be fetched"
    )
    assert "If you mean a folder, check its path" in said
    assert "hf download somebody/other" in said
    assert float(seconds) < 10


@pytest.mark.slow
def test_a_name_is_read_from_the_cache_without_a_network_and_another_refused(tmp_path: Path) -> None:
    hub_cache(tmp_path)
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + REFUSED], env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # 17 tokens of the 16-pixel grid become 5 of the 8-pixel one, and the head of 7 classes one of 10, drawn anew.
    *told, said, seconds = done.stdout.splitlines()
    assert told == ["hf 17 head.weight,head.bias", "7"]
    refused_at_once(said, seconds, tmp_path)
    assert "HF_HUB_OFFLINE is set" in said


@pytest.mark.slow
def test_a_name_in_no_cache_is_a_sentence_with_the_remedy_and_quick(tmp_path: Path) -> None:
    # No proxy answers there, so that no machine that tests run on can fetch anything.
    nowhere = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"), "http://127.0.0.1:9")
    environment = os.environ | nowhere | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "NO_PROXY": ""}
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], env=environment, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said, seconds = done.stdout.strip().splitlines()
    refused_at_once(said, seconds, tmp_path)
    assert "HF_HUB_OFFLINE is set" not in said


def test_a_folder_of_a_similar_name_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("runs/vit-digits").mkdir(parents=True)
    with pytest.raises(
        EnvironmentProblem, match=r"no folder runs/vit-digit\. Did you mean runs/vit-digits\? As a"
    ):
        local_weights("runs/vit-digit")
    with pytest.raises(EnvironmentProblem, match=r"no folder runs/marian-tiny\. As a"):
        local_weights("runs/marian-tiny")


def test_paths_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("somebody/vit-tiny").mkdir(parents=True)
    assert local_weights("somebody/vit-tiny") == Path("somebody/vit-tiny"), "a folder of that name goes first"
    assert local_weights("/weights/model.safetensors") == Path("/weights/model.safetensors")
    assert local_weights("runs/digits/export") == Path("runs/digits/export")
    step = Path("runs/digits/checkpoints/step-4")
    step.mkdir(parents=True)
    (step / "tensors.json").touch()
    for checkpoint in (step, step.parent):
        with pytest.raises(ConfigError, match=f"penstock checkpoint export {checkpoint} FOLDER"):
            local_weights(checkpoint)
    with pytest.raises(ConfigError, match="does not exist; give a safetensors file"):
        load_weights(create(ViTConfig(depth=1)), "runs/nowhere/export")


def test_without_the_package_that_fetches_it_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        EnvironmentProblem, match=r"no file or folder somebody/vit-tiny\. If .* 'penstock\[hf\]'"
    ):
        from_pretrained(NAME)


def test_only_safetensors_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: list[dict[str, object]] = []

    def download(**options: object) -> str:
        asked.append(options)
        if options.get("local_files_only"):
            raise hub.errors.LocalEntryNotFoundError("nothing there")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match="has no safetensors, and other formats can run code"):
        local_weights(f"{NAME}@v1")
    assert asked[1]["revision"] == "v1"
    assert not any("bin" in pattern for pattern in asked[1]["allow_patterns"])  # type: ignore[attr-defined]
