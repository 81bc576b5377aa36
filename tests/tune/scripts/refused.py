"""Scripts that cannot be timed: `refused.py none`, `short`, `several` or `crash`."""

import sys

import torch
from torch import nn

what = sys.argv[1]
one, other = nn.Linear(4, 4), nn.Linear(4, 4)
optimizers = [torch.optim.Adam(one.parameters())]
if what == "several":
    optimizers.append(torch.optim.SGD(other.parameters(), lr=0.1))
if what == "crash":
    raise ValueError("no data here")
for _ in range({"none": 0, "short": 4, "several": 100}[what]):
    loss = other(one(torch.randn(8, 4))).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
