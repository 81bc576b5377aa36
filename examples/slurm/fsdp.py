"""A training script of your own with FSDP: shards, exact resume, and a stop that a scheduler may ask for.

    penstock launch --procs 8 -- examples/slurm/fsdp.py --plan "precision=O1 optimizer=fused"
    sbatch examples/slurm/fsdp.sbatch                                        # on several nodes

Every rank runs this file. The Plan's `dp` is the number of ranks. The model is GPT-2 of transformers and its data are
random tokens; put your own in the two functions.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from transformers import GPT2Config, GPT2LMHeadModel

from penstock import Plan, Recipe
from penstock.build import Built, build
from penstock.checkpoint import Snapshot, by_index, by_name, clean, find, save
from penstock.errors import ExitCode
from penstock.launch.heartbeat import beat
from penstock.launch.signals import Requests
from penstock.parallel import joined, launched, local_device


def model(width: int, depth: int) -> nn.Module:
    """Made on every rank, one weight at a time: no rank ever holds the whole."""
    return GPT2LMHeadModel(
        GPT2Config(n_embd=width, n_layer=depth, n_head=max(2, width // 64), n_positions=256)
    )


def batch(step: int, rank: int, samples: int, device: torch.device) -> Tensor:
    """What this rank takes in this step; the same after a restart."""
    generator = torch.Generator().manual_seed(step * 100_003 + rank)
    return torch.randint(0, 50257, (samples, 256), generator=generator).to(device)


def loss(network: nn.Module, tokens: Tensor) -> Tensor:
    return network(tokens, labels=tokens).loss


def restored(built: Built, folder: Path, rank: int) -> int:
    """The step of the newest checkpoint that verifies, which is put back into model and optimizer."""
    clean(folder)  # what a killed save left; like `find`, on all ranks together
    if (stored := find(folder)) is None:
        return 0
    snapshot = stored.load(dict(built.model.named_parameters()), rank=rank, world=launched())
    built.model.load_state_dict(snapshot.weights["weights"])
    state = by_index(snapshot.state["optimizer"], built.optimizer.state_dict())
    built.optimizer.load_state_dict(state)
    return stored.step


def keep(built: Built, folder: Path, step: int) -> None:
    """Write a checkpoint; every rank writes its shards."""
    state = {"optimizer": by_name(built.optimizer.state_dict())}
    save(folder, Snapshot(step=step, weights={"weights": built.model.state_dict()}, state=state, config={}))


def asked_to_stop(stop: Requests) -> bool:
    """Whether any rank was asked: all of them must save the same step."""
    asked = torch.tensor([int(stop.signal is not None)])
    if distributed.is_initialized():
        distributed.all_reduce(asked, op=distributed.ReduceOp.MAX)
    return bool(asked)


def train(given: argparse.Namespace) -> int:
    device = local_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    plan = replace(Plan.parse(given.plan), dp=launched(), sharding="fsdp" if launched() > 1 else "ddp")
    folder = Path(given.output) / "checkpoints"
    with joined(plan, device) as dims, Requests() as stop:
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        make = lambda: model(given.width, given.depth)  # noqa: E731
        built = build(make, plan, device=device, recipe=Recipe(lr=given.lr), loss=loss, dims=dims)
        for step in range(restored(built, folder, rank), given.steps):
            result = built.step([batch(step, rank, plan.micro_batch, device)])
            beat(step)  # tells the agent that this rank is alive
            done, last = step + 1, step + 1 == given.steps
            # Both make the host wait for the device, so they are rare.
            if (done % given.every == 0 or last) and rank == 0:
                print(f"step {done}/{given.steps}  loss {result.loss.item():.4f}", flush=True)
            stopping = done % given.every == 0 and asked_to_stop(stop)
            if stopping or last or done % given.checkpoint_every == 0:
                keep(built, folder, done)
            if stopping:
                return int(ExitCode.SAVED_REQUEUE)
    return int(ExitCode.DONE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--plan", default="optimizer=fused micro_batch=4", help="all but the number of ranks")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--every", type=int, default=10, help="steps between lines, and looks at signals")
    parser.add_argument("--checkpoint-every", type=int, default=500)
    parser.add_argument("--output", default="runs/fsdp")
    sys.exit(train(parser.parse_args()))


if __name__ == "__main__":
    main()
