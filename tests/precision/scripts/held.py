"""Holds bound methods of its optimizer from the first line on. `held.py [schedule] [compile]`."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if "schedule" in sys.argv:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
step, zero_grad, call = optimizer.step, optimizer.zero_grad, model
if "compile" in sys.argv:
    call, step = torch.compile(model, backend="eager"), torch.compile(step, backend="eager")
x = torch.randn(64, 16)
y = x[:, :4].argmax(1)
for _ in range(20):
    zero_grad()
    loss = nn.functional.cross_entropy(call(x), y)
    loss.backward()
    step()
print(f'{{"loss": {loss.item()}}}')
