"""A plain loop: a data loader, a model, a loss, and nothing else. `plain.py STEPS`."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(256, 16)
data = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_function = nn.CrossEntropyLoss()
step = 0
while step < int(sys.argv[1]):
    for inputs, labels in data:
        optimizer.zero_grad()
        loss = loss_function(model(inputs), labels)
        loss.backward()
        optimizer.step()
        step += 1
print(f"loss {loss.item():.4f} in the form {'fused' if optimizer.param_groups[0]['fused'] else 'loop'}")
