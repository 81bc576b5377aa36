"""What most ranks of `helpers.spawn` need: their server imports it before it forks them, as each would take 4 s to."""

from __future__ import annotations

import contextlib
import gc
from importlib import import_module

for name in (
    "torch._dynamo",  # an optimizer imports it
    "torch.distributed.fsdp",
    "pytest",
    "hypothesis",
    "helpers.forked",
    "helpers.spawn",
    "penstock.build",
    "penstock.cli.launch",
    "penstock.cli.train",
    "penstock.train.loop",
):
    import_module(name)
for name in ("transformers.modeling_utils", "tokenizers"):
    with contextlib.suppress(ImportError):
        import_module(name)

# Ranks collect only garbage of their own; looking through all of this would copy its pages besides.
gc.freeze()
