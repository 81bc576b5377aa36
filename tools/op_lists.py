"""Write docs/reference/op-lists.md from the op lists: `make reference`.

A test runs `page()` and compares, so the page cannot fall behind.
"""

from __future__ import annotations

from pathlib import Path

from penstock.precision.lists.op_lists import autocast_policy
from penstock.precision.lists.table import AUTOCAST, BANNED, GROUPS, POLICIES, Group, Half

PATH = Path(__file__).parent.parent / "docs" / "reference" / "op-lists.md"
NUMBERS: dict[Half, str] = {
    "fp16": "11 bits, largest 65,504, smallest 6e-8",
    "bf16": "8 bits, the range of fp32",
}

INTRODUCTION = """\
# Op lists: what runs in which type

Written by `make reference` from `penstock.precision.lists`; do not edit. Every reason is measured, for each operation
and against fp64, in `tests/precision/lists/test_claims.py`; what torch.autocast does is run in `test_autocast.py`.

Levels O1 and O2 run under `torch.autocast`. An `OpLists` says what Penstock decides: where torch.autocast does the same
by itself nothing is added, and an operation in no list runs as torch.autocast has it.

| list | what happens |
|---|---|
| `half` | floating arguments are cast to the half type |
| `fp32` | floating arguments are cast to fp32, and so is the result |
| `promote` | arguments of several types are cast to the widest of them |
| `keep` | runs in the type it is given, where torch.autocast would widen it |
| `banned` | raises `ConfigError` when given half-width tensors; the message says what to use instead |

An operation is in fp32 for a type only if it leaves that type's range or loses more than the final rounding in it; GELU
and SiLU are in no list, since their kernels compute in fp32 and round once. In-place operations keep the type they
write to, and fp64 stays fp64.

**What it costs.** The default lists watch no call on CUDA, nor for bf16 on a CPU: torch's own modules (`LayerNorm`,
`RMSNorm`, `GroupNorm`, `Softmax`) do what `keep` says. Lists with other differences are applied by a mode of torch's
that sees every call of torch in the forward pass, which costs a few microseconds of host time each in eager mode, and
nothing in compiled code. What torch.autocast on a CPU lacks of what it casts on CUDA is *registered* with torch
instead, when the first model is prepared, in the place where torch's own casts are: it costs nothing elsewhere, and
holds for the whole process, where torch would have refused the mixed arguments. `keep` gains where activations
are half, as with half weights (O2): with fp32 weights the residual stream is mostly fp32, and a norm of it stays fp32.

```python
import torch
from penstock.precision.lists import default_lists, fp32_function

lists = default_lists(torch.bfloat16).with_(
    fp32=["torch.softmax", torch.cdist],           # by name or as functions
    banned={"torch.linalg.inv": "solve the system with torch.linalg.solve instead"},
    fp32_modules=("head", "blocks.*.router"),      # by name, pattern or class
)

@fp32_function                                     # your own; register_fp32_function(module, "name") for a library's
def geometric_mean(x: torch.Tensor) -> torch.Tensor:
    return x.log().mean().exp()
```

An LSTM on a CPU whose kernel lacks the half type runs in fp32, which is tried once, when a model has one; name
`torch.lstm` in a list to decide it yourself. Functional norms of one's own weights (`layer_norm(x, shape, self.w)` in a
class without "norm" in its name) need `promote` on a CPU under O2: they are too frequent to be registered.

One name stands for every way to call an operation: `torch.softmax`, `x.softmax()` and `torch.nn.functional.softmax`.
A function of torch that is written in Python is seen as a whole; what it calls inside runs as torch.autocast has it.
Activation checkpointing recomputes alike, and compilation follows. Only a checkpoint *inside* compiled code cannot
follow lists with differences: it breaks the graph, or is refused with `fullgraph=True`; compile the blocks inside it
instead.
"""


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    for dtype, numbers in NUMBERS.items():
        lines += [f"## {dtype}: {numbers}", ""]
        for policy in POLICIES:
            groups = [group for group in GROUPS if group.policy == policy and dtype in group.dtypes]
            if groups:
                lines += [
                    f"### {dtype} `{policy}`",
                    "",
                    "| operations | in the default lists of | differs from torch.autocast on | why |",
                    "|---|---|---|---|",
                    *(_row(group) for group in groups),
                    "",
                ]
    lines += ["## What to use instead of what is banned", ""]
    lines += [f"- {message}" for message in BANNED.values()]
    lines += ["", "## torch.autocast by itself", "", "| device | list | operations |", "|---|---|---|"]
    for device, table in AUTOCAST.items():
        lines += [f"| {device} | `{policy}` | {_names(names)} |" for policy, names in table.items()]
    return "\n".join([*lines, ""])


def _row(group: Group) -> str:
    differs = [
        device
        for device in group.devices
        if any(autocast_policy(name, device) != group.policy for name in group.names)
    ]
    return f"| {_names(group.names)} | {', '.join(group.devices)} | {', '.join(differs) or '–'} | {group.reason} |"


def _names(names: tuple[str, ...]) -> str:
    short = sorted(name.removeprefix("torch.").removeprefix("nn.functional.") for name in names)
    return ", ".join(f"`{name}`" for name in short)


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
