"""Averages of weights as timm keeps them, copied before or after the optimizer. `ema.py WHEN [v3] [compile]`."""

import copy
import json
import sys

import torch
from torch import nn


class ModelEma(nn.Module):
    def __init__(self, model, decay=0.8):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model), decay
        self.module.eval()

    @torch.no_grad()
    def update(self, model):
        if "v3" in sys.argv:
            mine, theirs = list(self.module.parameters()), list(model.parameters())
            torch._foreach_lerp_(mine, theirs, weight=1.0 - self.decay)
            return
        for mine, theirs in zip(self.module.state_dict().values(), model.state_dict().values()):
            mine.copy_(
                self.decay * mine + (1.0 - self.decay) * theirs if mine.is_floating_point() else theirs
            )

    def forward(self, x):
        return self.module(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.body(x))


torch.manual_seed(0)
when, model = sys.argv[1], Net()
average = ModelEma(model) if when == "before" else None
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
average = ModelEma(model) if when == "after" else average
x = torch.randn(64, 16)
y = x[:, :4].argmax(1)


def loss_of():
    return nn.functional.cross_entropy(model(x), y)


loss_of = torch.compile(loss_of, backend="eager") if "compile" in sys.argv else loss_of
for update in range(30):
    optimizer.zero_grad()
    loss_of().backward()
    optimizer.step()
    average = ModelEma(model) if average is None and update == 2 else average
    if average is not None:
        average.update(model)
        with torch.no_grad():
            average(x)
kinds = sorted({str(value.dtype) for value in average.state_dict().values()})
print(json.dumps({"loss": nn.functional.cross_entropy(average(x), y).item(), "kinds": kinds}))
