"""Whether Triton's kernels run here. Triton is imported only when a kernel is launched."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

import torch

_log = logging.getLogger(__name__)


@functools.cache
def have_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton's interpreter runs kernels in place of a GPU; Triton reads the same variable."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device; a GPU without Triton is reported once."""
    if device.type == "cuda" and not have_triton():
        _report_once()
    return have_triton() and (device.type == "cuda" or interpreting())


@functools.cache
def _report_once() -> None:
    _log.warning("Triton is not installed, so plain operations replace fused kernels, and are slower.")
