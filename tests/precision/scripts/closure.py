"""An optimizer that asks for the loss itself: `closure.py LBFGS` or `closure.py SGD`. Ends with code 3."""

import json
import sys

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(128, 8)
y = x @ torch.randn(8, 1)
model = nn.Linear(8, 1)
kind = sys.argv[1]
if kind == "LBFGS":
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=8, line_search_fn="strong_wolfe")
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


first = closure().item()
for _ in range(8 if kind == "LBFGS" else 40):
    optimizer.step(closure)
print(json.dumps({"first": first, "loss": closure().item()}))
sys.exit(3)
