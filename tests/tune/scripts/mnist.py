"""The shape of PyTorch's mnist example: functions for training and testing, Adadelta. `mnist.py --epochs N`."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
        self.dropout1, self.fc1, self.fc2 = nn.Dropout(0.25), nn.Linear(400, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(self.dropout1(torch.flatten(x, 1))))), dim=1)


def train(model, device, batches, optimizer):
    model.train()
    for data, target in batches:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        F.nll_loss(model(data), target).backward()
        optimizer.step()


def test(model, device, batches):
    model.eval()
    loss = 0.0
    with torch.no_grad():
        for data, target in batches:
            loss += F.nll_loss(model(data.to(device)), target.to(device), reduction="sum").item()
    return loss / sum(len(target) for _, target in batches)


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=14)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(args.seed)
device = torch.device("cpu")
target = torch.arange(256) % 10
images = torch.randn(10, 1, 14, 14)[target] + 0.5 * torch.randn(256, 1, 14, 14)
batches = list(zip(images.split(32), target.split(32)))
model = Net().to(device)
optimizer = optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
for _epoch in range(1, args.epochs + 1):
    train(model, device, batches, optimizer)
    print(f"Test set: average loss: {test(model, device, batches):.4f}")
    scheduler.step()
