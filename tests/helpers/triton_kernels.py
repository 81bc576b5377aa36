"""Triton kernels without a GPU: run in the interpreter, with mutants that must fail, and compiled for some GPUs.

A test file that `interpret` takes has `check(device)`, which compares kernels with their references, and MUTANTS: which
module of penstock.kernels.triton, a text that its source has once, and what takes its place.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.modules import loaded
from penstock.kernels.has_triton import have_triton

needs_triton = pytest.mark.skipif(not have_triton(), reason="Triton is not installed (pip install triton)")
SHARED = {80: 166_912, 90: 232_448, 100: 232_448}
"""Bytes of shared memory that a program of each architecture may have."""
REGISTERS = 65_536
"""Registers of 32 bits that a program may have."""


def interpret(file: Path, sixth: int) -> None:
    """Run the `check` of a test file in Triton's interpreter, in a process of its own, and see a sixth of its mutants
    fail."""
    done = subprocess.run(
        [sys.executable, __file__, str(file), str(sixth)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "all equal"


def _mutant_is_seen(case: ModuleType, mutant: tuple[str, str, str], folder: Path) -> bool:
    import penstock.kernels.triton as room

    name, text, change = mutant
    whole = f"{room.__name__}.{name}"
    own = importlib.import_module(whole)
    source = Path(str(own.__file__)).read_text(encoding="utf-8")
    assert source.count(text) == 1, f"{name} has {text!r} {source.count(text)} times"
    path = folder / f"{name}.py"
    path.write_text(source.replace(text, change), encoding="utf-8")
    try:
        setattr(room, name, loaded(path, whole))
        case.check("cpu")
    except AssertionError:
        return True
    finally:
        sys.modules[whole] = own
        setattr(room, name, own)
    return False


def _main(file: str, sixth: str) -> None:
    torch.set_num_threads(1)
    case = loaded(Path(file), "case")
    case.check("cpu")
    for mutant in case.MUTANTS[int(sixth) :: 6]:
        with tempfile.TemporaryDirectory() as folder:
            assert _mutant_is_seen(case, mutant, Path(folder)), f"{mutant} passes the check"
    print("all equal")


def compile_for(
    architecture: int, kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], *,
    aligned: Collection[str] = (), single: int | None = 0, **options: Any,
) -> Callable[[str], int]:  # fmt: skip
    """Compile a kernel for an architecture, of arguments of these types; pointers, and the numbers named in `aligned`,
    are multiples of 16. It fits into shared memory and registers, spills none of these, and reads memory in vectors or
    asynchronously, but for `single` halves; None does not ask for that. Returns how to count a pattern in the program.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in aligned or signature[name].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=attrs)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    assert made.metadata.shared <= SHARED[architecture]
    assert used["STACK"] + used["LOCAL"] == 0, f"{names} spill registers"
    assert used["REG"] * made.metadata.num_warps * 32 <= REGISTERS

    def count(pattern: str) -> int:
        return len(re.findall(pattern, made.asm["ptx"]))

    if single is not None:
        assert count(r"cp\.async|ld\.global\S*\.v[48]\.") > 0, "nothing is read in vectors"
        assert count(r"ld\.global\S*\.b16") <= single, "a number at a time"
    return count


def after_steps(loss: Callable[..., Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """Weights after 32 steps of gradient descent on their loss."""
    leaves = [weight.detach().clone().requires_grad_() for weight in weights]
    for _ in range(32):
        gradients = torch.autograd.grad(loss(*leaves), leaves)
        with torch.no_grad():
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.sub_(gradient, alpha=0.1)
    return [leaf.detach() for leaf in leaves]


if __name__ == "__main__":
    _main(*sys.argv[1:])
