"""The shape of transformers' run_clm_no_trainer.py, with eager attention. `no_trainer.py STEPS`."""

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("max_train_steps", type=int)
parser.add_argument("--attn_implementation", default="eager")
args = parser.parse_args()
torch.manual_seed(42)
config = GPT2Config(
    vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
config._attn_implementation = args.attn_implementation
model = GPT2LMHeadModel(config)
blocks = torch.randint(96, (256, 32))
samples = [{"input_ids": block, "labels": block} for block in blocks]
loader = DataLoader(samples, shuffle=True, collate_fn=default_data_collator, batch_size=4)
no_decay = ["bias", "ln_"]
groups = [
    {
        "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
        "weight_decay": 0.1,
    },
    {
        "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
        "weight_decay": 0.0,
    },
]
optimizer = torch.optim.AdamW(groups, lr=5e-4)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=args.max_train_steps)
completed = 0
while completed < args.max_train_steps:
    model.train()
    for batch in loader:
        outputs = model(**batch)
        outputs.loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        completed += 1
        if completed >= args.max_train_steps:
            break
print(f"loss {outputs.loss.item():.4f}")
