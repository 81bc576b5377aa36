"""The shape of timm's train script: a registry of models, groups without weight decay, an EMA copied from the model, a
schedule that steps per update, and a loss scaler that is a callable and may be turned off.
"""

import argparse
import copy
import json
import math
from contextlib import suppress

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="mixer_tiny")
parser.add_argument("--amp", action="store_true")
parser.add_argument("--update-freq", type=int, default=2)
parser.add_argument("--clip-grad", type=float, default=1.0)
parser.add_argument("--clip-mode", default="norm", choices=["norm", "value", "agc"])
args = parser.parse_args()
_registry = {}


def register_model(function):
    _registry[function.__name__] = function
    return function


class Mixer(nn.Module):
    def __init__(self, dim, depth, classes):
        super().__init__()
        self.stem = nn.Conv2d(1, dim, 2, stride=2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(depth)
        )
        self.norm = nn.BatchNorm1d(dim)
        self.head = nn.Linear(dim, classes)

    def no_weight_decay(self):
        return {"head.bias"}

    def forward_features(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x):
        return self.head(self.norm(self.forward_features(x).mean(1)))


@register_model
def mixer_tiny(classes=4):
    return Mixer(24, 2, classes)


def param_groups_weight_decay(model, weight_decay):
    skip = model.no_weight_decay()
    decay, rest = [], []
    for name, parameter in model.named_parameters():
        (rest if parameter.ndim <= 1 or name in skip else decay).append(parameter)
    return [{"params": rest, "weight_decay": 0.0}, {"params": decay, "weight_decay": weight_decay}]


class ModelEma(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.module.state_dict().values(), model.state_dict().values()):
            if mine.is_floating_point():
                mine.lerp_(theirs.to(mine.dtype), 1.0 - self.decay)
            else:
                mine.copy_(theirs)


def dispatch_clip_grad(parameters, value, mode):
    if mode == "norm":
        nn.utils.clip_grad_norm_(parameters, value)
    elif mode == "value":
        nn.utils.clip_grad_value_(parameters, value)
    else:  # adaptive clipping changes the gradients by hand
        for parameter in parameters:
            limit = parameter.detach().norm().clamp_(min=1e-3).mul_(value)
            norm = parameter.grad.detach().norm().clamp(min=1e-6)
            parameter.grad.detach().mul_((limit / norm).clamp(max=1.0))


class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu")

    def __call__(self, loss, optimizer, clip_grad, clip_mode, parameters, need_update):
        self._scaler.scale(loss).backward()
        if need_update:
            self._scaler.unscale_(optimizer)
            dispatch_clip_grad(parameters, clip_grad, clip_mode)
            self._scaler.step(optimizer)
            self._scaler.update()


torch.manual_seed(0)
model = _registry[args.model]()
loss_scaler = NativeScaler() if args.amp else None
amp_autocast = (lambda: torch.autocast("cpu", torch.bfloat16)) if args.amp else suppress
optimizer = torch.optim.AdamW(param_groups_weight_decay(model, 0.05), lr=5e-3)
model_ema = ModelEma(model, decay=0.9)
labels = torch.arange(64) % 4
stripes = torch.ones(4, 1, 8, 8)
stripes[0, :, ::2] = stripes[1, :, :, ::2] = stripes[2, :, ::2, ::2] = 0.0
images = stripes[labels] + 0.3 * torch.randn(64, 1, 8, 8)
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.0)
updates = 0
model.train()
for _epoch in range(30):
    optimizer.zero_grad()
    for index, (x, y) in enumerate(zip(images.split(16), labels.split(16))):
        need_update = (index + 1) % args.update_freq == 0
        with amp_autocast():
            loss = loss_fn(model(x), y) / args.update_freq
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, args.clip_grad, args.clip_mode, model.parameters(), need_update)
        else:
            loss.backward()
            if need_update:
                dispatch_clip_grad(model.parameters(), args.clip_grad, args.clip_mode)
                optimizer.step()
        if need_update:
            optimizer.zero_grad()
            updates += 1
            model_ema.update(model)
            for group in optimizer.param_groups:
                group["lr"] = 5e-3 * 0.5 * (1 + math.cos(math.pi * updates / 60))

model.eval()
with torch.inference_mode():
    right = (model(images).argmax(1) == labels).float().mean().item()
    ema = (model_ema.module(images).argmax(1) == labels).float().mean().item()
kinds = sorted({str(p.dtype) for p in model_ema.module.state_dict().values()})
print(json.dumps({"accuracy": right, "ema": ema, "kinds": kinds, "updates": updates}))
