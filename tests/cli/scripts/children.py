"""Trains in processes that it starts, by any method."""

import multiprocessing
import sys


class Worker(multiprocessing.Process):
    """A class of its own: there is no target to wrap."""

    def run(self) -> None:
        train()


def train() -> None:
    import torch

    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    processes = [multiprocessing.Process(target=train), Worker()]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(process.exitcode or 0 for process in processes))
