"""The shape of transformers' run_glue.py: arguments parsed into dataclasses, texts padded to the longest of a batch, a
Trainer. `run_glue.py --output_dir FOLDER --max_steps STEPS …`.
"""

from dataclasses import dataclass, field

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ModelArguments:
    hidden_size: int = field(default=32, metadata={"help": "Width of the model."})


model_args, training_args = HfArgumentParser(
    (ModelArguments, TrainingArguments)
).parse_args_into_dataclasses()
training_args.use_cpu, training_args.report_to, training_args.disable_tqdm = True, [], True
training_args.save_strategy, training_args.dataloader_pin_memory = "no", False
set_seed(training_args.seed)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=64, hidden_size=model_args.hidden_size, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32,
    )
)  # fmt: skip
lengths = torch.randint(4, 32, (256,)).tolist()
samples = [{"input_ids": torch.randint(2, 64, (length,)).tolist()} for length in lengths]
for sample in samples:
    sample["label"] = sample["input_ids"][0] % 2


def collate(features):
    longest = max(len(f["input_ids"]) for f in features)
    rows = [f["input_ids"] + [0] * (longest - len(f["input_ids"])) for f in features]
    mask = [[1] * len(f["input_ids"]) + [0] * (longest - len(f["input_ids"])) for f in features]
    labels = torch.tensor([f["label"] for f in features])
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask), "labels": labels}


trainer = Trainer(model=model, args=training_args, train_dataset=samples, data_collator=collate)
result = trainer.train()
print(f"loss {result.training_loss:.4f}")
