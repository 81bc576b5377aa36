"""Checks of what is installed: versions, devices, compilers, and what connects ranks and loader processes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.doctor.finding import Finding, first_line, last_line, run, run_python

_TORCH_FLOOR = (2, 11)
_CORE = ("numpy", "safetensors", "pillow", "pyyaml", "rich", "cyclopts", "jinja2")
# Distribution, the extra that brings it, and what it is for.
_OPTIONAL = (
    ("starlette", "serve", "penstock serve"),
    ("uvicorn", "serve", "penstock serve"),
    ("onnxruntime", "export", "checked export to ONNX"),
    ("ctranslate2", "export", "export to CTranslate2"),
    ("gguf", "export", "export to GGUF"),
    ("peft", "lora", "LoRA adapters in peft's format"),
    ("sacrebleu", "text", "BLEU of translations"),
    ("num2words", "text", "the translator of numbers"),
    ("simplejpeg", "images", "faster JPEG decoding"),
    ("opencv-python-headless", "images", "faster JPEG decoding and resizing"),
    ("transformers", "hf", "Hugging Face models"),
    ("tensorboardX", "track", "TensorBoard logs"),
    ("wandb", "wandb", "logs in Weights & Biases"),
    ("mlflow-skinny", "mlflow", "logs in MLflow"),
)


def python() -> Finding:
    detail = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("versions", "python", "ok", detail, required=True)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def core_packages() -> Iterator[Finding]:
    for name in ("penstock", *_CORE):
        required = name != "penstock"  # which has no metadata when it runs from a source tree
        if version := _version(name):
            yield Finding("versions", name, "ok", version, required=required)
        else:
            yield Finding("versions", name, "broken", "is not installed", f"pip install {name}", required)


def optional_packages() -> Iterator[Finding]:
    for name, extra, purpose in _OPTIONAL:
        if version := _version(name):
            yield Finding("extras", name, "ok", version)
        else:
            yield Finding(
                "extras", name, "absent", f"would give {purpose}", f"pip install 'penstock[{extra}]'"
            )


def torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        remedy = "pip install --force-reinstall 'torch>=2.11'"
        return Finding("versions", "torch", "broken", first_line(error), remedy, required=True)
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    if getattr(torch.version, "hip", None):
        built = f"ROCm {torch.version.hip}"
    detail = f"{torch.__version__}, built with {built}"
    if version < _TORCH_FLOOR:
        return Finding(
            "versions", "torch", "broken", detail, "pip install --upgrade 'torch>=2.11'", required=True
        )
    return Finding("versions", "torch", "ok", detail, required=True)


def torchvision() -> Finding:
    """torchvision's wheel is linked against CUDA: beside a CPU build of torch it breaks whatever imports it."""
    version = _version("torchvision")
    if version is None:
        return Finding("extras", "torchvision", "absent", "not needed; only timm asks for it")
    code, error = run_python("import torchvision; torchvision.ops.nms")
    if code == 0:
        return Finding("extras", "torchvision", "ok", version)
    detail = f"{version} cannot be imported, which breaks transformers and timm too: {last_line(error)}"
    remedy = "pip uninstall torchvision, or install the build that fits this torch"
    return Finding("extras", "torchvision", "broken", detail, remedy)


def devices() -> Iterator[Finding]:
    import torch

    from penstock.probe import cpu_name

    threads, cores = torch.get_num_threads(), os.cpu_count()
    yield Finding("devices", "cpu", "ok", f"{cpu_name()}, {threads} threads on {cores} cores")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            size = f"{gpu.total_memory / 1e9:.1f} GB, capability {gpu.major}.{gpu.minor}"
            yield Finding("devices", f"cuda:{index}", "ok", f"{gpu.name}, {size}")
        return
    # A GPU that torch cannot use is the most common problem, and its most common cause is a CPU build of torch.
    drivers = (Path("/dev/nvidia0"), Path("/dev/kfd"))
    if not any(path.exists() for path in drivers) and shutil.which("nvidia-smi") is None:
        yield Finding("devices", "cuda", "absent", "there is no GPU here")
    elif torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        remedy = "pip install --force-reinstall torch, from the index that pytorch.org names for this driver"
        yield Finding("devices", "cuda", "broken", "there is a GPU, but this torch is built for CPUs", remedy)
    else:
        remedy = "Look at `nvidia-smi`: update the driver, or unset CUDA_VISIBLE_DEVICES."
        yield Finding("devices", "cuda", "broken", "there is a GPU, but torch cannot start it", remedy)


def usable_devices() -> list[Any]:
    import torch

    gpus = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    return [torch.device("cpu"), *gpus]


def compiler() -> Finding:
    """Whether a C++ compiler builds what torch.compile writes for CPUs: OpenMP and Python's own headers."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        missing = "torch.compile on CPUs needs one"
        return Finding("compile", "C++ compiler", "absent", missing, "apt-get install g++")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.cpp")
        source.write_text(
            "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
        )
        include = sysconfig.get_paths()["include"]
        code, error = run([compiler, "-fopenmp", f"-I{include}", "-fsyntax-only", str(source)])
    if code == 0:
        return Finding("compile", "C++ compiler", "ok", compiler)
    detail = f"{compiler} cannot build for torch.compile: {first_line(error)}"
    remedy = "apt-get install python3-dev" if "Python.h" in error else "apt-get install g++ libgomp1"
    return Finding("compile", "C++ compiler", "broken", detail, remedy)


def compile() -> Finding:
    """Compile, run and differentiate a small function."""
    code, error = run_python(
        "import torch; d = 'cuda' if torch.cuda.is_available() else 'cpu'; x = torch.linspace(-1, 1, 512, device=d);"
        "f = lambda x: torch.nn.functional.gelu(x).sum();"
        "a = x.clone().requires_grad_(); b = x.clone().requires_grad_();"
        "torch.compile(f)(a).backward(); f(b).backward();"
        "torch.testing.assert_close(a.grad, b.grad)"
    )
    if code == 0:
        return Finding("compile", "torch.compile", "ok", "compiled and differentiated a function")
    remedy = "Fix the compiler above, or leave plan.compile=none."
    return Finding("compile", "torch.compile", "broken", last_line(error), remedy)


def triton() -> Finding:
    import torch

    version = _version("triton") or _version("pytorch-triton-rocm")
    if version is None:
        if not torch.cuda.is_available():
            return Finding("compile", "triton", "absent", "only GPUs need it")
        return Finding(
            "compile", "triton", "broken", "torch.compile on this GPU needs it", "pip install triton"
        )
    code, error = run_python("import triton, triton.language")
    if code == 0:
        return Finding("compile", "triton", "ok", version)
    detail = f"{version} cannot be imported: {last_line(error)}"
    return Finding("compile", "triton", "broken", detail, "pip install --force-reinstall triton")


def distributed() -> Iterator[Finding]:
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding("ranks", "torch.distributed", "absent", "this torch is built without it")
        return
    for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())):
        detail = "available" if there else "not built into this torch"
        yield Finding("ranks", name, "ok" if there else "absent", detail)


def shared_memory() -> Finding:
    """Loader processes pass batches through /dev/shm, and containers often give it 64 MB."""
    try:
        total = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Finding("data", "shared memory", "absent", "there is no /dev/shm")
    detail = f"/dev/shm holds {total / 1e9:.2f} GB"
    if total >= 256e6:
        return Finding("data", "shared memory", "ok", detail)
    remedy = "Start the container with --shm-size=2g, or keep data.workers at 0."
    return Finding("data", "shared memory", "broken", detail, remedy)


def probed() -> Finding:
    from penstock.config.machine import cached_machine
    from penstock.probe import machine_name

    name = machine_name(usable_devices()[-1])
    if kept := cached_machine(name):
        return Finding("data", "machine file", "ok", kept.name)
    return Finding("data", "machine file", "absent", f"{name} has not been measured yet", "penstock probe")
