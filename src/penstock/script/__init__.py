"""Mixed precision for a script that knows nothing of it: `penstock run` lets the script meet this instead of plain
torch.

While `Interception` is installed, torch is changed in few places, each of which has one reason:

- `Optimizer.__init__` tells which weights are to be trained; `Optimizer.add_param_group` refuses what master weights
  cannot follow.
- The step of a class of optimizers calls a closure ahead, only while the optimizer waits for its model: Lightning's
  Trainer makes the first forward pass in there, and the step is then that of an accelerated optimizer. So is a step
  that the script has held since before.
- `nn.Module.__call__`, only while an optimizer waits for its model, tells which module is called from outside any
  other: that one is accelerated, right before its first forward pass with gradients.
- `torch.autograd.backward`, to which `Tensor.backward` leads, shows at first in which types a model has computed. It
  multiplies what it starts from by the loss scale and
  divides all gradients by it when it is done, so that whatever the script reads, clips or changes are true gradients.
- `torch.compile` tells that compiled code may call a model where `nn.Module.__call__` does not see it.
- `nn.Module.zero_grad` forgets an overflow together with the gradients.
- `GradScaler.__init__` tells that the script scales its loss itself.
- The functions of `torch.export`, `torch.onnx`, `torch.jit` and `torch.fx` that record a model get its plain fp32
  form, as from plain Python.

All of it is undone by `remove`; what was accelerated stays so.
"""

from __future__ import annotations

from penstock.script.interception import Interception

__all__ = ["Interception"]
