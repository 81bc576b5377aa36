"""The shape of PyTorch's imagenet example: a convolutional network, SGD with momentum, meters and a schedule by epoch.
`imagenet.py --epochs N`.
"""

import argparse
import time

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value, n=1):
        self.sum, self.count = self.sum + value * n, self.count + n

    def __str__(self):
        return f"{self.name} {self.sum / max(self.count, 1):.4f}"


class BasicBlock(nn.Module):
    def __init__(self, planes):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False), nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=90)
    args = parser.parse_args()
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), BasicBlock(16), BasicBlock(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 10),
    )  # fmt: skip
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    data = TensorDataset(torch.randn(128, 3, 16, 16), torch.randint(10, (128,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    for epoch in range(args.epochs):
        train(loader, model, criterion, optimizer, epoch)
        scheduler.step()


def train(loader, model, criterion, optimizer, epoch):
    batch_time, losses = AverageMeter("Time"), AverageMeter("Loss")
    model.train()
    end = time.time()
    for images, target in loader:
        loss = criterion(model(images), target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
    print(f"Epoch {epoch}: {batch_time} {losses}")


if __name__ == "__main__":
    main()
