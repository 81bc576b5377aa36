"""Checks of what is installed: versions, devices, compilers, and what connects ranks and loader processes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.doctor.finding import Finding, first_line, last_line

_TORCH_FLOOR = (2, 11)
_CORE = ("numpy", "safetensors", "pillow", "pyyaml", "rich", "cyclopts")
# Distribution, the extra that brings it, and what it is for.
_OPTIONAL = (
    ("simplejpeg", "images", "faster JPEG decoding"),
    ("opencv-python-headless", "images", "faster JPEG decoding and resizing"),
    ("transformers", "hf", "Hugging Face models"),
    ("tensorboardX", "track", "TensorBoard logs"),
)
_SUBPROCESS_SECONDS = 120


def python() -> Finding:
    version = platform.python_version()
    detail = f"Python {version} on {platform.system()} {platform.machine()}"
    return Finding(area="versions", name="python", status="ok", detail=detail, required=True)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def core_packages() -> Iterator[Finding]:
    for name in ("penstock", *_CORE):
        version = _version(name)
        yield Finding(
            area="versions",
            name=name,
            status="ok" if version else "broken",
            detail=version or "is not installed",
            remedy="" if version else f"pip install {name}",
            required=name != "penstock",  # absent from the metadata when run from a source tree, and no harm
        )


def optional_packages() -> Iterator[Finding]:
    for name, extra, purpose in _OPTIONAL:
        version = _version(name)
        yield Finding(
            area="extras",
            name=name,
            status="ok" if version else "absent",
            detail=version or f"would give {purpose}",
            remedy="" if version else f"pip install 'penstock[{extra}]'",
        )


def torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding(
            area="versions", name="torch", status="broken", detail=first_line(error), required=True,
            remedy="pip install --force-reinstall 'torch>=2.11'",
        )  # fmt: skip
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    if getattr(torch.version, "hip", None):
        built = f"ROCm {torch.version.hip}"
    old = version < _TORCH_FLOOR
    return Finding(
        area="versions",
        name="torch",
        status="broken" if old else "ok",
        detail=f"{torch.__version__}, built with {built}",
        remedy="pip install --upgrade 'torch>=2.11'" if old else "",
        required=True,
    )


def torchvision() -> Finding:
    """torchvision's wheel is linked against CUDA: beside a CPU build of torch it breaks whatever imports it."""
    version = _version("torchvision")
    if version is None:
        return Finding(
            area="extras", name="torchvision", status="absent", detail="not needed; only timm asks for it"
        )
    code, _, error = _python_subprocess("import torchvision; torchvision.ops.nms")
    if code == 0:
        return Finding(area="extras", name="torchvision", status="ok", detail=version)
    return Finding(
        area="extras",
        name="torchvision",
        status="broken",
        detail=f"{version} cannot be imported, which breaks transformers and timm too: {last_line(error)}",
        remedy="pip uninstall torchvision, or install the build that fits this torch",
    )


def devices() -> Iterator[Finding]:
    import torch

    from penstock.probe import cpu_name

    threads, cores = torch.get_num_threads(), os.cpu_count()
    yield Finding(
        area="devices", name="cpu", status="ok", detail=f"{cpu_name()}, {threads} threads on {cores} cores"
    )
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            yield Finding(
                area="devices",
                name=f"cuda:{index}",
                status="ok",
                detail=f"{found.name}, {found.total_memory / 1e9:.1f} GB, capability {found.major}.{found.minor}",
            )
        return
    # A GPU that torch cannot use is the commonest trouble of all, and the commonest cause is a CPU build of torch.
    present = (
        Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists() or shutil.which("nvidia-smi") is not None
    )
    if not present:
        yield Finding(area="devices", name="cuda", status="absent", detail="there is no GPU here")
    elif torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        yield Finding(
            area="devices", name="cuda", status="broken", detail="there is a GPU, but this torch is built for CPUs",
            remedy="pip install --force-reinstall torch, from the index that pytorch.org names for this driver",
        )  # fmt: skip
    else:
        yield Finding(
            area="devices", name="cuda", status="broken", detail="there is a GPU, but torch cannot start it",
            remedy="Look at `nvidia-smi`: update the driver, or unset CUDA_VISIBLE_DEVICES.",
        )  # fmt: skip


def usable_devices() -> list[Any]:
    import torch

    gpus = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    return [torch.device("cpu"), *gpus]


def compiler() -> Finding:
    """Whether a C++ compiler builds what torch.compile writes for CPUs: OpenMP and Python's own headers."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        return Finding(
            area="compile", name="C++ compiler", status="absent", detail="torch.compile on CPUs needs one",
            remedy="apt-get install g++",
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.cpp")
        source.write_text(
            "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
        )
        include = sysconfig.get_paths()["include"]
        command = [compiler, "-fopenmp", f"-I{include}", "-fsyntax-only", str(source)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_SUBPROCESS_SECONDS, check=False
            )
            code, error = done.returncode, done.stderr
        except (OSError, subprocess.TimeoutExpired) as failure:
            code, error = 1, str(failure)
    if code == 0:
        return Finding(area="compile", name="C++ compiler", status="ok", detail=compiler)
    missing = "Python.h" in error
    return Finding(
        area="compile",
        name="C++ compiler",
        status="broken",
        detail=f"{compiler} cannot build for torch.compile: {first_line(error)}",
        remedy="apt-get install python3-dev" if missing else "apt-get install g++ libgomp1",
    )


def compile() -> Finding:
    """Compile, run and differentiate a small function in a process of its own, which a crash cannot hurt."""
    program = (
        "import torch; d = 'cuda' if torch.cuda.is_available() else 'cpu'; x = torch.linspace(-1, 1, 512, device=d);"
        "f = lambda x: torch.nn.functional.gelu(x).sum();"
        "a = x.clone().requires_grad_(); b = x.clone().requires_grad_();"
        "torch.compile(f)(a).backward(); f(b).backward();"
        "torch.testing.assert_close(a.grad, b.grad)"
    )
    code, _, error = _python_subprocess(program)
    if code == 0:
        return Finding(
            area="compile", name="torch.compile", status="ok", detail="compiled and differentiated a function"
        )
    return Finding(
        area="compile",
        name="torch.compile",
        status="broken",
        detail=last_line(error),
        remedy="Mend the compiler above, or leave plan.compile=none.",
    )


def triton() -> Finding:
    import torch

    version = _version("triton") or _version("pytorch-triton-rocm")
    if version is None:
        needed = torch.cuda.is_available()
        return Finding(
            area="compile",
            name="triton",
            status="broken" if needed else "absent",
            detail="torch.compile on this GPU needs it" if needed else "only GPUs need it",
            remedy="pip install triton" if needed else "",
        )
    code, _, error = _python_subprocess("import triton, triton.language")
    return Finding(
        area="compile",
        name="triton",
        status="ok" if code == 0 else "broken",
        detail=version if code == 0 else f"{version} cannot be imported: {last_line(error)}",
        remedy="" if code == 0 else "pip install --force-reinstall triton",
    )


def distributed() -> Iterator[Finding]:
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding(
            area="ranks", name="torch.distributed", status="absent", detail="this torch is built without it"
        )
        return
    for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())):
        yield Finding(
            area="ranks",
            name=name,
            status="ok" if there else "absent",
            detail="available" if there else "not built into this torch",
        )


def shared_memory() -> Finding:
    """Loader processes hand batches over in /dev/shm, and containers often give it 64 MB."""
    try:
        free = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Finding(area="data", name="shared memory", status="absent", detail="there is no /dev/shm")
    small = free < 256e6
    return Finding(
        area="data",
        name="shared memory",
        status="broken" if small else "ok",
        detail=f"/dev/shm holds {free / 1e9:.2f} GB",
        remedy="Start the container with --shm-size=2g, or keep data.workers at 0." if small else "",
    )


def probed() -> Finding:
    from penstock.config.machine import cached_machine
    from penstock.probe import machine_name

    device = usable_devices()[-1]
    kept = cached_machine(machine_name(device))
    return Finding(
        area="data",
        name="machine file",
        status="ok" if kept else "absent",
        detail=kept.name if kept else f"{machine_name(device)} has not been measured yet",
        remedy="" if kept else "penstock probe",
    )


def _python_subprocess(program: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a short program in a new interpreter."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=_SUBPROCESS_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        return 1, "", str(failure)
    return done.returncode, done.stdout, done.stderr
