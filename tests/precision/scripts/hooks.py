"""An optimizer for each tensor, which steps in a hook of the backward pass."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}


def step(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step)
x = torch.randn(64, 16)
y = x[:, :4].argmax(1)
for _ in range(30):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
print(f'{{"loss": {loss.item()}}}')
