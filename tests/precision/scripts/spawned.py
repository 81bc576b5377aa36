"""DistributedDataParallel in processes that the script starts by itself."""

import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    kinds = set()
    inner[0].register_forward_hook(lambda module, args, output: kinds.add(str(output.dtype)))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)
    x = torch.randn(32, 4)
    losses = []
    for step in range(30):
        optimizer.zero_grad()
        # Rank 1 alone overflows once: both have to skip the step.
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() * (1e6 if rank and step == 3 else 1.0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    mine = torch.cat([p.detach().flatten() for p in inner.parameters()])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    if rank == 0:
        same = bool(torch.equal(*both)) and bool(mine.isfinite().all())
        print(
            json.dumps({"first": losses[0], "loss": losses[-1], "kinds": sorted(kinds), "same": same}),
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(folder,), nprocs=2)
