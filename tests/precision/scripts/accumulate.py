"""Micro-batches that add up, two models with one optimizer, clipping, a look at the gradients, and a checkpoint that
is loaded again.
"""

import copy
import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

torch.manual_seed(0)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 24)
        self.mix = nn.GRU(24, 24, batch_first=True)

    def forward(self, tokens):
        return self.mix(self.embed(tokens))[0]


encoder, decoder = Encoder(), nn.Linear(24, 17)
temperature = nn.Parameter(torch.ones(()))  # of no module
weights = [*encoder.parameters(), *decoder.parameters()]
optimizer = torch.optim.SGD(
    [{"params": weights}, {"params": [temperature], "lr": 1e-2}], lr=0.5, momentum=0.9
)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
tokens = torch.arange(64).reshape(8, 8) % 17
losses, norms = [], []

for step in range(15):
    total = 0.0
    for micro in tokens.split(2):
        logits = decoder(encoder(micro[:, :-1])) * temperature
        loss = F.cross_entropy(logits.flatten(0, 1), micro[:, 1:].flatten()) / 4
        loss.backward()
        total += loss.item()
    everything = [*encoder.parameters(), *decoder.parameters(), temperature]
    norms.append(clip_grad_norm_(everything, 0.2).item())
    if step == 0:
        clipped = torch.stack([p.grad.float().norm() for p in everything]).norm().item()
    optimizer.step()
    optimizer.zero_grad()
    warmup.step()
    losses.append(total)
    if step == 9:
        kept = copy.deepcopy([encoder.state_dict(), decoder.state_dict(), optimizer.state_dict()])
        warmth = temperature.detach().clone()

after = losses[-1]
encoder.load_state_dict(kept[0])
decoder.load_state_dict(kept[1])
optimizer.load_state_dict(kept[2])
with torch.no_grad():
    temperature.copy_(warmth)
    logits = decoder(encoder(tokens[:, :-1])) * temperature
    again = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
print(
    json.dumps(
        {"first": losses[0], "at10": losses[10], "again": again, "loss": after, "norm": norms[0],
         "clipped": clipped, "kinds": sorted({str(v.dtype) for v in kept[0].values()})}
    )
)  # fmt: skip
