"""The shape of Accelerate's examples: everything is prepared, and the accelerator runs backward passes and clips.
`accelerated.py STEPS`.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
x = torch.randn(512, 8, 16)
data = DataLoader(TensorDataset(x, x.mean((1, 2))), batch_size=16, shuffle=True)
layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(128, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10**6)
model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
model.train()
step = 0
while step < int(sys.argv[1]):
    for inputs, targets in data:
        with accelerator.accumulate(model):
            loss = (model(inputs).squeeze(-1) - targets).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                step += 1
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
accelerator.print(f"loss {loss.item():.4f}")
