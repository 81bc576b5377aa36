"""What is settled before a run builds anything: how many ranks, and which machine."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch

from penstock.config.machine import Machine, load_machine
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.launch import ELASTIC
from penstock.parallel import fit_to_ranks, launched
from penstock.probe import machine_for

_log = logging.getLogger(__name__)


def as_many_ranks_as_there_are(config: RunConfig) -> RunConfig:
    """`config` with a Plan for as many ranks as were started, where the launcher lets nodes come and go.

    The global batch stays the same. Raises ConfigError if it cannot be split evenly, with the numbers that can.
    """
    if ELASTIC not in os.environ or config.plan.gpus == launched():
        return config
    plan = fit_to_ranks(config.plan, launched())
    _log.warning(
        "%d ranks are there instead of %d: plan.dp=%d, micro_batch=%d, accumulate=%d.",
        launched(), config.plan.gpus, plan.dp, plan.micro_batch, plan.accumulate,
    )  # fmt: skip
    return replace(config, plan=plan)


def machine_of(config: RunConfig, device: torch.device) -> Machine:
    """The machine that `config` names; without one, what is known of `device` or quickly measured.

    Raises ConfigError if a GPU is named for a run on a CPU, or the other way round.
    """
    if config.machine is None:
        return machine_for(device)
    machine = load_machine(config.machine)
    if machine.device != device.type:
        raise ConfigError(
            f"machine {config.machine} is a {machine.device} machine, but the run is on {device}. "
            f"Name one of its kind, or leave machine out."
        )
    return machine
