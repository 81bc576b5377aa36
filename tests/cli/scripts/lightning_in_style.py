"""The shape of Lightning: a module with steps of its own, a Trainer whose steps get a closure. Argument: steps."""

import sys
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(nn.Module):
    def log(self, name, value):
        self.trainer.metrics[name] = value.item()


class Trainer:
    def __init__(self, max_steps):
        self.max_steps, self.metrics, self.step = max_steps, {}, 0

    def fit(self, module, batches):
        module.trainer = self
        optimizers, schedules = module.configure_optimizers()
        module.train()
        while True:
            for index, batch in enumerate(batches):
                optimizers[0].step(closure=partial(self.closure, module, optimizers[0], batch, index))
                schedules[0].step()
                self.step += 1
                if self.step == self.max_steps:
                    return

    def closure(self, module, optimizer, batch, index):
        loss = module.training_step(batch, index)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        return loss.detach()


class Classifier(Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 2))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]


torch.manual_seed(1)
x = torch.randn(512, 16)
data = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32, shuffle=True)
trainer = Trainer(max_steps=int(sys.argv[1]))
trainer.fit(Classifier(), data)
print(f"loss: {trainer.metrics['train_loss']:.4f}")
