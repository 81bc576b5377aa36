"""The plainest loop: a classifier on two rings, evaluated and saved as its documentation would do it."""

import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--save", default=None)
parser.add_argument("--precision", default="the script's own option of the same name")
args = parser.parse_args()

torch.manual_seed(0)
angle = torch.rand(256) * 6.2832
label = torch.arange(256) % 2
points = torch.stack([angle.cos(), angle.sin()], 1) * (1.0 + label[:, None])

model = nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

for _ in range(args.steps):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(points), label)
    loss.backward()
    optimizer.step()
    scheduler.step()

model.eval()
with torch.no_grad():
    accuracy = (model(points).argmax(1) == label).float().mean().item()
if args.save:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save)
bits = [p.double().sum().item().hex() for p in model.state_dict().values()]
print(json.dumps({"loss": loss.item(), "accuracy": accuracy, "bits": bits, "said": args.precision}))
