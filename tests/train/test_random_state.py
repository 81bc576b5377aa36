"""Random generators go back exactly."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from penstock.checkpoint.tree import pack, unpack
from penstock.train.run_state import random_state, set_random_state


def draw(device: str = "cpu") -> tuple[object, ...]:
    torch_numbers = torch.rand(3).tolist() + torch.rand(3, device=device).tolist()
    return (*torch_numbers, *np.random.rand(3), np.random.randn(), random.random(), random.gauss(0, 1))


def test_all_generators_continue_where_they_were() -> None:
    draw()  # leaves half-used pairs of Gaussians behind
    state = random_state(torch.device("cpu"))
    expected = draw()
    assert draw() != expected
    set_random_state(unpack(*pack(state)), torch.device("cpu"))
    assert draw() == expected


@pytest.mark.gpu
def test_the_devices_generator_continues_too() -> None:
    state = random_state(torch.device("cuda"))
    expected = draw("cuda")
    set_random_state(unpack(*pack(state)), torch.device("cuda"))
    assert draw("cuda") == expected
