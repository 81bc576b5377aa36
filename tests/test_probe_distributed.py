"""The probe's all-reduce bandwidth, between real gloo processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.alone

_RANK = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from penstock.probe.rates import all_reduce_bandwidth
torch.set_num_threads(1)
assert all_reduce_bandwidth(torch.device("cpu"), quick=True) is None  # no process group yet
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
print(all_reduce_bandwidth(torch.device("cpu"), quick=True), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_two_ranks_measure_a_bandwidth_between_them() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        measured = [float(rank.communicate(timeout=90)[0].split()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    # Loopback moves between a slow disk's rate and a memory bus's; a wrong unit or formula would leave that.
    assert all(1e7 < bandwidth < 1e11 for bandwidth in measured)
