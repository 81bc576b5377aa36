"""Hugging Face's Trainer on a small BERT. `trainer.py OUTPUT [bf16]`."""

import json
import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
)  # fmt: skip
tokens = torch.randint(2, 32, (64, 8))
tokens[:, 0] = torch.arange(64) % 2  # the first token says the label
samples = [{"input_ids": t, "labels": t[0]} for t in tokens]
arguments = TrainingArguments(
    output_dir=sys.argv[1], max_steps=30, per_device_train_batch_size=8, gradient_accumulation_steps=2,
    learning_rate=3e-3, max_grad_norm=1.0, logging_steps=10, save_strategy="no", report_to=[], use_cpu=True,
    disable_tqdm=True, seed=0, bf16="bf16" in sys.argv,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=samples, eval_dataset=samples)
trainer.train()
found = trainer.evaluate()
trainer.save_model(sys.argv[1])
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
print(json.dumps({"first": losses[0], "loss": found["eval_loss"], "norm": max(map(float, norms))}))
