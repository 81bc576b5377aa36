"""A loop in the style of Accelerate's first example."""

import sys

from accelerate import Accelerator
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import torch  # isort: skip  # after the libraries, as most scripts have it
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset


def training_function(steps: int) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    ids = torch.randint(5, 60, (64, 12))
    loader = DataLoader(TensorDataset(ids, (ids[:, 0] > 30).long()), shuffle=True, batch_size=8)
    config = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = BertForSequenceClassification(config).to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    done = 0
    while done < steps:
        for batch, labels in loader:
            accelerator.backward(model(input_ids=batch, labels=labels).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done += 1
            if done == steps:
                break
    accelerator.print("done")


if __name__ == "__main__":
    training_function(int(sys.argv[1]))
