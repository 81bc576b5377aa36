"""Optimizers by name, in the forms that a Plan can choose: the same weights with different numbers of launches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from penstock.config.optimizers import OPTIMIZERS, Algorithm, OptimizerForm, form_problems
from penstock.errors import ConfigError
from penstock.optim.clip import loses_updates
from penstock.optim.contiguous import contiguous, in_own_form
from penstock.optim.lion import Lion
from penstock.optim.muon import Muon
from penstock.optim.one_pass import OnePassAdamW, takes_one_pass

FORM_FLAGS: dict[OptimizerForm, dict[str, bool]] = {
    "loop": {"foreach": False, "fused": False}, "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True}, "contiguous": {"foreach": False, "fused": True},
}  # fmt: skip
"""The options of torch's optimizers that select a form."""
_OWN: dict[Algorithm, type[Optimizer]] = {"muon": Muon, "lion": Lion}


def make_optimizer(
    groups: Iterable[dict[str, Any]] | Iterable[torch.Tensor], form: OptimizerForm,
    algorithm: Algorithm = "adamw", *, lr: float, betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8, weight_decay: float = 0.0, muon_momentum: float = 0.95,
) -> Optimizer:  # fmt: skip
    """AdamW (Loshchilov and Hutter, ICLR 2019) over parameters or groups, in one of the forms of `Plan.optimizer`; or
    another of `OPTIMIZERS`. SGD's momentum is the first of `betas`; weight decay is part of the gradient in torch
    optimizers that implement it so. Muon orthogonalises the marked groups of `parameter_groups(…, matrices=True)`.

    `loop` launches several kernels per tensor, `foreach` several per chunk of tensors, `fused` one per chunk, and
    `contiguous` one per group and dtype, over flat buffers. Groups may carry an `lr_scale` (see `parameter_groups`). A
    state dict of any form loads into any other, and the optimizer keeps its own form (plain torch would switch to the
    file's form). Raises ConfigError for an unknown form, or one that the parameters' device or the algorithm does not
    support.
    """
    if form not in FORM_FLAGS:
        raise ConfigError(f"There is no optimizer form {form!r}; choose one of {', '.join(FORM_FLAGS)}.")
    listed: list[Any] = list(groups)
    if not listed:
        raise ConfigError("The optimizer was given no parameters; is every part of the model frozen?")
    if problems := [*form_problems(algorithm, form)]:
        raise ConfigError(problems)
    row, values = OPTIMIZERS[algorithm], {"betas": betas, "momentum": betas[0], "alpha": betas[1], "eps": eps}
    flags = FORM_FLAGS[form] if "fused" in row.forms else {"foreach": form != "loop"}
    options: dict[str, Any] = {"lr": lr, **flags, **{name: values[name] for name in row.settings}}
    options |= {"weight_decay": weight_decay} if row.decays else {}
    options |= {"momentum": muon_momentum} if algorithm == "muon" else {}
    kind = _OWN[algorithm] if algorithm in _OWN else getattr(torch.optim, row.torch)
    try:
        if form == "contiguous":
            optimizer: Optimizer = contiguous(kind, listed, elementwise=kind is Lion, **options)
        else:
            if form == "fused" and algorithm == "adamw" and takes_one_pass(listed):
                kind = OnePassAdamW
            optimizer = kind(listed, **options)
            keep_form(optimizer)
    except RuntimeError as error:
        if "fused" not in str(error):
            raise
        problem = f"plan.optimizer={form} cannot be used: {error} Use plan.optimizer=foreach."
        raise ConfigError(problem) from error
    if loses_updates(optimizer):
        raise ConfigError(
            f"plan.optimizer={form} cannot be used with plan.algorithm=sgd: torch's fused SGD does not update half "
            "weights on a CPU. Use plan.optimizer=foreach."
        )
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
        if algorithm not in ("adamw", "sgd"):  # older checkpoints of these two have no such entry
            group["algorithm"] = algorithm
    return optimizer


def keep_form(optimizer: Optimizer) -> None:
    """Let `load_state_dict` load hyperparameters and state, but not how the step is executed."""

    def pre_hook(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        loaded = in_own_form(optimizer, state_dict)
        states = loaded["state"] = dict(state_dict["state"])
        for group in loaded["param_groups"]:
            if not group.get("fused"):  # these forms read the counter on the host in each step
                for index in group["params"]:
                    if isinstance(states.get(index, {}).get("step"), torch.Tensor):
                        states[index] = {**states[index], "step": states[index]["step"].cpu()}
        return loaded

    optimizer.register_load_state_dict_pre_hook(pre_hook)
