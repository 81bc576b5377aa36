"""Mixed precision for a script written without it: under `penstock run` the script meets this instead of plain torch.

While `Interception` is installed, torch is changed in a few places, each for one reason:

- `Optimizer.__init__` shows which weights are to be trained; `Optimizer.add_param_group` refuses groups that master
  weights do not support.
- The step of an optimizer class first calls its closure, but only while the optimizer waits for its model: Lightning's
  Trainer makes the first forward pass in the closure, and the step is then an accelerated optimizer's. So is a step
  method that the script has stored earlier.
- `nn.Module.__call__`, only while an optimizer waits for its model, shows which module is called from outside any
  other: that module is accelerated, right before its first forward pass with gradients.
- `torch.autograd.backward`, which `Tensor.backward` calls, shows at first in which types a model has computed. It
  multiplies the loss by the loss scale and divides all gradients by it at the end, so that the script reads, clips and
  changes true gradients.
- `torch.compile` shows that compiled code may call a model without `nn.Module.__call__`.
- `nn.Module.zero_grad` clears an overflow together with the gradients.
- `GradScaler.__init__` shows that the script scales its loss itself.
- The functions of `torch.export`, `torch.onnx`, `torch.jit` and `torch.fx` that record a model get its plain fp32
  form, as from plain Python.

`remove` undoes all of it; accelerated models stay accelerated.
"""

from __future__ import annotations

from penstock.script.interception import Interception

__all__ = ["Interception"]
