"""The shape of timm's train.py: a registry, groups without decay, drop path, mixup, an average of the weights, and a
schedule by update. `timm_train.py STEPS`.
"""

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("updates", type=int)
parser.add_argument("--model", default="vit_nano")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--clip-grad", type=float, default=1.0)
parser.add_argument("--mixup", type=float, default=0.2)
args = parser.parse_args()


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))


class DropPath(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training or self.rate == 0.0:
            return x
        keep = 1 - self.rate
        return x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(keep) / keep


class Block(nn.Module):
    def __init__(self, dim, heads, drop_path):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(dim), Attention(dim, heads), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop_path = DropPath(drop_path)

    def forward(self, x):
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    def __init__(self, dim=32, depth=2, heads=2, classes=10):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 8, stride=8)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 16, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, 0.1 * i / depth) for i in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def no_weight_decay(self):
        return {"pos_embed"}

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
        return self.head(self.norm(self.blocks(x)).mean(1))


MODELS = {"vit_nano": VisionTransformer}
torch.manual_seed(42)
model = MODELS[args.model]().to(memory_format=torch.channels_last)
skip = model.no_weight_decay()
named = list(model.named_parameters())
groups = [
    {"params": [p for n, p in named if p.ndim <= 1 or n in skip], "weight_decay": 0.0},
    {"params": [p for n, p in named if p.ndim > 1 and n not in skip], "weight_decay": 0.05},
]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
average = copy.deepcopy(model).eval()
images, labels = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
for update in range(args.updates):
    index = torch.randint(64, (args.batch_size,))
    x, y = images[index].contiguous(memory_format=torch.channels_last), F.one_hot(labels[index], 10).float()
    share = torch.distributions.Beta(args.mixup, args.mixup).sample()
    x, y = share * x + (1 - share) * x.flip(0), share * y + (1 - share) * y.flip(0)
    loss = torch.sum(-y * F.log_softmax(model(x), dim=-1), dim=-1).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
    optimizer.step()
    with torch.no_grad():
        for mean, value in zip(average.state_dict().values(), model.state_dict().values()):
            mean.lerp_(value, 0.01)
    for group in optimizer.param_groups:
        group["lr"] = 5e-4 * (1 + math.cos(math.pi * update / args.updates))
print(f"loss {loss.item():.4f}")
