"""`plan.matmul=probed`: linear layers choose libraries by the products that a probe of this CPU measured."""

from __future__ import annotations

import logging

import torch
from torch import distributed, nn

from penstock.errors import ConfigError, EnvironmentProblem
from penstock.kernels.probed_linear import ProbedLinear, choose_by
from penstock.models.heads import Vocabulary
from penstock.models.wrap import swap
from penstock.parallel import ParallelDims
from penstock.planner.libraries import onednn_choice
from penstock.planner.rates import ONEDNN
from penstock.probe import machine_for

_log = logging.getLogger(__name__)


def choose_libraries(model: nn.Module, device: torch.device, dims: ParallelDims) -> None:
    """Let linear layers of torch's own class, and heads over a vocabulary, choose a library for each product, in place.

    All ranks choose by rank 0's measurement, so that results which several ranks compute stay equal. Raises ConfigError
    unless the device is a CPU, and EnvironmentProblem if oneDNN was not measured.
    """
    if device.type != "cpu":
        raise ConfigError(
            "plan.matmul=probed chooses between a CPU's libraries; on a GPU use matmul=high for TF32."
        )
    machines = [None if dims.rank else machine_for("cpu")]
    if not dims.alone:
        distributed.broadcast_object_list(machines, src=0)
    machine = machines[0]
    if machine is None or ONEDNN not in machine.peak_flops:
        raise EnvironmentProblem(
            "plan.matmul=probed needs a build of torch with oneDNN, and this one has none; leave plan.matmul out."
        )
    choose_by(onednn_choice(machine))
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    probed = [linear for linear in linears if type(linear) in (nn.Linear, Vocabulary)]
    for linear in probed:
        if isinstance(linear, Vocabulary):
            linear.probed = True
        else:
            swap(linear, ProbedLinear)
    _log.info("matmul=probed: %d of %d linear layers choose libraries", len(probed), len(linears))
