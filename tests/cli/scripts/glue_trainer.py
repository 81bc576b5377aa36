"""A classifier of pairs of sentences tuned by transformers' Trainer; imports in the order that isort gives them."""

import sys

import datasets
import numpy as np
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    default_data_collator,
)


def main(steps: int, output: str, *options: str) -> None:
    draw = np.random.default_rng(0)
    ids = draw.integers(5, 60, (64, 12))
    rows = {"input_ids": ids, "attention_mask": np.ones_like(ids), "label": (ids[:, 0] > 30).astype(int)}
    data = datasets.Dataset.from_dict({name: value.tolist() for name, value in rows.items()})
    config = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    arguments = TrainingArguments(
        output_dir=output, max_steps=steps, per_device_train_batch_size=8, learning_rate=1e-3, report_to="none",
        save_strategy="no", use_cpu=True, disable_tqdm=True, bf16="--bf16" in options,
    )  # fmt: skip
    trainer = Trainer(
        model=BertForSequenceClassification(config), args=arguments, train_dataset=data,
        data_collator=default_data_collator,
    )  # fmt: skip
    print("loss", trainer.train().training_loss)
    trainer.save_model(output)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *sys.argv[3:])
