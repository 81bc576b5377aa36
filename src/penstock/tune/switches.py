"""Settings of a Plan for a script written without Penstock: `penstock run --plan "…" train.py`.

Only the settings that a line names are applied; everything else stays as in the script. Precision is applied by
`penstock.script`, which finds the script's models and optimizers and calls `ScriptSwitches` for them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _get_fused_kernels_supported_devices  # type: ignore[attr-defined]

from penstock.apply import SCRIPT, Setup, apply, settings_for
from penstock.config.numerics import numerics_of
from penstock.config.plan import OptimizerForm, Plan
from penstock.config.rules import require
from penstock.errors import ConfigError
from penstock.models.anatomy import inner_model
from penstock.optim.forms import FORM_FLAGS, keep_form
from penstock.process import matmul_precision, set_host_memory

PRECISION = ("precision", "dtype", "norms", "products")
"""Settings that `penstock.accelerate` applies."""
APPLIED = (*settings_for(SCRIPT), "optimizer", "host_memory")
"""Settings that can be applied to a script from outside: to its models, to its process, and to its optimizers."""


class ScriptSwitches:
    """The settings that a Plan's line names, to be applied to the models and optimizers of a script.

    Raises ConfigError for a setting that only the script itself can make, and for settings that contradict each other.
    """

    def __init__(self, line: str) -> None:
        self.line, self.plan, self.named = line, Plan.parse(line), Plan.named(line)
        self._held = ExitStack()
        problems = [
            f"plan.{name} cannot be applied to a script from outside, because the script itself decides it; penstock "
            f"run accepts {', '.join(APPLIED)}."
            for name in sorted(self.named - {*APPLIED})
        ]
        if "optimizer" in self.named and self.plan.optimizer == "contiguous":
            problems.append(
                "plan.optimizer=contiguous changes the layout of weights, which a script's own optimizer does not "
                "support; use optimizer=fused."
            )
        if "recompute" in self.named and self.plan.recompute == "budget":
            problems.append(
                "plan.recompute=budget needs the operators of one of Penstock's own models; use recompute=early."
            )
        if problems:
            raise ConfigError(problems)
        require(self.plan, run=True)

    @property
    def asks(self) -> bool:
        """Whether there is anything to apply besides precision."""
        return bool(self.named - {*PRECISION})

    @property
    def precision(self) -> dict[str, Any]:
        """Arguments for `penstock.script.Interception` with the same meaning."""
        named = {name: getattr(self.plan, name) for name in PRECISION if name in self.named}
        return {"precision": "O0", **named}

    def prepare(self, optimizer: Optimizer) -> None:
        """Make a new optimizer update in the Plan's form, also after a state is loaded.

        Raises ConfigError for an optimizer without this form.
        """
        if "optimizer" not in self.named:
            return
        if problem := form_problem(optimizer, self.plan.optimizer):
            raise ConfigError(f"plan.optimizer={self.plan.optimizer} cannot be applied: {problem}.")
        flags = FORM_FLAGS[self.plan.optimizer]
        for options in (optimizer.defaults, *optimizer.param_groups):
            options.update({name: on for name, on in flags.items() if name in options})
        # torch's own loss scaler asks for this attribute, which the constructor of a fused optimizer sets.
        if flags["fused"]:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        else:
            optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        keep_form(optimizer)

    def apply(self, model: nn.Module, *, compiled: bool) -> list[str]:
        """Change a model in the order of `penstock.apply`; return the settings that were applied, as words of a Plan.

        Raises ConfigError if the model does not support a setting.
        """
        plan, named, inner = self.plan, self.named, inner_model(model)
        if plan.recompute != "none" and any(
            getattr(module, "gradient_checkpointing", False) for module in inner.modules()
        ):
            raise ConfigError(
                f"plan.recompute={plan.recompute} cannot be applied: the script has turned on gradient checkpointing "
                f"of {type(inner).__name__}; leave plan.recompute out."
            )
        if compiled and plan.offload == "activations":
            raise ConfigError(
                "plan.offload=activations cannot be applied: it offloads what eager blocks save, and the script calls "
                "torch.compile itself; leave plan.offload out."
            )
        if compiled and plan.compile != "none":
            raise ConfigError(
                f"plan.compile={plan.compile} cannot be applied: the script calls torch.compile itself; leave "
                "plan.compile out."
            )
        if "matmul" in named:  # at once, because a script may set it when it starts
            self._held.enter_context(matmul_precision(plan.matmul))
        setup = Setup(
            purpose=SCRIPT, plan=plan, numerics=numerics_of(plan), device=next(model.parameters()).device,
            named=named, compiled=compiled,
        )  # fmt: skip
        apply(inner, setup, "libraries", "switches", "fuse", "recompute", "offload")
        apply(model, setup, "compile")
        if "host_memory" in named:
            set_host_memory(keep=plan.host_memory == "keep")
        fields = [name for name in APPLIED if name in named and name not in PRECISION]
        return [word for word in self.line.split() if word.partition("=")[0] in fields]

    def remove(self) -> None:
        """Undo the settings that apply to the whole process."""
        self._held.close()
        if "host_memory" in self.named:
            set_host_memory(keep=False)


def form_problem(optimizer: Optimizer, form: OptimizerForm) -> str | None:
    """Why an optimizer cannot update in a form; None if it can."""
    name = type(optimizer).__name__
    if form != "loop" and form not in optimizer.defaults:
        return f"{name} has no {form} form"
    if form == "fused":
        able = _get_fused_kernels_supported_devices()
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        unable = sorted({p.device.type for p in weights} - {*able})
        if unable:
            return f"torch has no fused {name} on {', '.join(unable)}"
        if not all(torch.is_floating_point(p) for p in weights):
            return f"torch has no fused {name} for complex weights"
    return None
