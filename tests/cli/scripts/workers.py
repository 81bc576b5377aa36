"""A script with a guard, whose batches come from processes, and which saves in a thread and at its exit."""

import argparse
import atexit
import threading
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Points(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, int(x[0] > 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def save(model: nn.Module, path: str, seconds: float) -> None:
    time.sleep(seconds)
    torch.save(model, path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", default="fork")
    parser.add_argument("--save", default="")
    options = parser.parse_args()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Points(), 16, shuffle=True, num_workers=1, multiprocessing_context=options.workers)
    for _ in range(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    if options.save:
        atexit.register(save, model, f"{options.save}/exit.pt", 0.0)
        threading.Thread(target=save, args=(model, f"{options.save}/thread.pt", 0.5)).start()


if __name__ == "__main__":
    main()
