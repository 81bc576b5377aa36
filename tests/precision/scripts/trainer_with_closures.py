"""A trainer like Lightning's, which gives every step a closure.

    trainer_with_closures.py automatic|manual LARGEST STEPS

Automatic: the closure makes the forward pass, the backward pass and the clipping, the very first of them too. Manual:
the training step does, and the closure nothing. The optimizer is wrapped in an object that passes for one of its class.
"""

import json
import sys
import warnings

import torch
from torch import nn

kind, largest, steps = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])


class Wrapped:
    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Wrapped" + type(optimizer).__name__, (Wrapped, type(optimizer)), {})

    def step(self, closure=lambda: None):
        def whole():
            loss = closure()
            if kind == "automatic":
                nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
            return loss

        return self._optimizer.step(closure=whole)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.body(x)


torch.manual_seed(0)
net = Net()
inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
warnings.filterwarnings(
    "ignore", "Detected call of .lr_scheduler.step"
)  # a first step that was skipped looks so
schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.99)
optimizer = Wrapped(inner)
x = torch.randn(64, 16)
y = largest * x.sum(1, keepdim=True) / 4
losses = []


def compute():
    optimizer.zero_grad()
    loss = (net(x) - y).square().mean()
    losses.append(loss.item())
    loss.backward()
    return loss


for _ in range(steps):
    if kind == "automatic":
        assert optimizer.step(compute).item() == losses[-1]
    else:
        compute()
        optimizer.step()
    schedule.step()
weights = torch.cat([value.float().flatten() for value in net.state_dict().values()])
print(json.dumps({"losses": losses, "finite": bool(weights.isfinite().all())}))
