"""torch.compile, before the optimizer is made or after, or around the whole computation of the loss."""

import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("where", choices=["before", "after", "inplace", "function"])
parser.add_argument("--backend", default="aot_eager")
args = parser.parse_args()
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def loss_of(x, y):
    return F.mse_loss(model(x), y)


x = torch.randn(32, 16)
y = torch.roll(x, 1, 1)
model = nn.Sequential(Block(), Block())
if args.where == "before":
    model = torch.compile(model, backend=args.backend)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if args.where == "after":
    model = torch.compile(model, backend=args.backend)
elif args.where == "inplace":
    model.compile(backend=args.backend)
elif args.where == "function":
    loss_of = torch.compile(loss_of, backend=args.backend, fullgraph=True)

losses = []
for _ in range(25):
    optimizer.zero_grad(set_to_none=True)
    loss = loss_of(x, y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps({"first": losses[0], "loss": losses[-1]}))
