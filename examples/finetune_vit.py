"""Fine-tune a Vision Transformer of transformers or timm on a folder of images, one subfolder per class.

    python examples/finetune_vit.py photos --model google/vit-base-patch16-224-in21k
    python examples/finetune_vit.py photos --model timm:vit_small_patch16_224 --plan "precision=O1 optimizer=fused"

A model of transformers is a name on its hub or a folder that `save_pretrained` wrote; one of timm needs timm and a
torchvision that fits torch. Every fifth image is kept for validation. `penstock ladder` says which Plan is fastest.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from penstock import Augment, DataConfig, ImageClassification, Plan, Recipe, image_loader, open_source
from penstock.build import build
from penstock.train.evaluate import evaluate


def load(name: str, classes: int) -> tuple[nn.Module, int]:
    """The pretrained model with a new head for so many classes, and the size of its images."""
    if name.startswith("timm:"):
        import timm

        model = timm.create_model(name.removeprefix("timm:"), pretrained=True, num_classes=classes)
        return model, model.default_cfg["input_size"][-1]
    from transformers import AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(
        name, num_labels=classes, ignore_mismatched_sizes=True
    )
    return model, model.config.image_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="google/vit-base-patch16-224-in21k")
    parser.add_argument(
        "--plan", default="optimizer=fused micro_batch=32", help="one line, such as the ladder gives"
    )
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--output", type=Path, default=Path("runs/finetuned.safetensors"))
    given = parser.parse_args()

    data = DataConfig(source=f"imagefolder:{given.folder}")
    classes = len(open_source(data, split="train").classes)
    model, size = load(given.model, classes)
    plan, device = Plan.parse(given.plan), "cuda" if torch.cuda.is_available() else "cpu"
    recipe = Recipe(lr=given.lr, weight_decay=0.01)
    task = ImageClassification()
    # The batches are in [-1, 1], which is how Google's Vision Transformers were trained.
    built = build(model, plan, device=device, recipe=recipe, loss=task)

    options = {"image_size": size, "classes": classes, "batch": plan.micro_batch, "device": device}
    images = open_source(data, split="train", image_size=size)
    steps = max(1, round(given.epochs * len(images) / plan.micro_batch))
    with image_loader(images, augment=Augment(crop_scale_min=0.5), **options) as batches:
        for step, batch in zip(range(1, steps + 1), batches):
            # Waiting for the loss would stall the device, so it is read only now and then.
            result = built.step([(batch.images, batch.targets)])
            if step % 10 == 0 or step == steps:
                print(f"step {step}/{steps}  loss {result.loss.item():.4f}", flush=True)

    kept = open_source(data, split="val", image_size=size)
    with image_loader(kept, endless=False, **options) as batches, built.inference():
        found = evaluate(task, built.model, batches)
    print(f"top-1 {found.top1:.1%} of {found.samples} validation images")

    from safetensors.torch import save_file

    given.output.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in built.model.state_dict().items()}, given.output)
    print(f"weights in {given.output}")


if __name__ == "__main__":
    main()
