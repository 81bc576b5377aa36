"""Find out what works on this machine by trying it, and say how to fix what does not.

Nothing here trusts a version number where a small computation can show it. The checks themselves import torch, so that
a broken torch is a finding and not a traceback.
"""

from __future__ import annotations

import importlib.metadata
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

from penstock.doctor import numerics
from penstock.doctor.numerics import Finding as Finding
from penstock.doctor.numerics import first_line

SUBPROCESS_SECONDS = 120
_TORCH_FLOOR = (2, 11)
_CORE = ("numpy", "safetensors", "pillow", "pyyaml", "rich", "cyclopts", "jinja2")
# Distribution, the extra that brings it, and what it is for.
_OPTIONAL = (
    ("starlette", "serve", "penstock serve"), ("uvicorn", "serve", "penstock serve"),
    ("onnxruntime", "export", "checked export to ONNX"), ("ctranslate2", "export", "export to CTranslate2"),
    ("gguf", "export", "export to GGUF"), ("peft", "lora", "LoRA adapters in peft's format"),
    ("sacrebleu", "text", "BLEU of translations"), ("num2words", "text", "the translator of numbers"),
    ("sentencepiece", "text", "tokenizers of Marian and in .model files"),
    ("simplejpeg", "images", "faster JPEG decoding"),
    ("opencv-python-headless", "images", "faster JPEG decoding and resizing"),
    ("transformers", "hf", "Hugging Face models"), ("tensorboardX", "track", "TensorBoard logs"),
    ("wandb", "wandb", "logs in Weights & Biases"), ("mlflow-skinny", "mlflow", "logs in MLflow"),
)  # fmt: skip


def examine() -> list[Finding]:
    """All checks of this installation, in reading order."""
    return list(findings())


def findings() -> Iterator[Finding]:
    """The findings of `examine`, each as soon as its check has been made."""
    yield from packages()
    yield (torch := torch_itself())
    if torch.status != "ok":
        return
    yield from extras()
    yield from devices()
    for device in _usable_devices():
        yield from numerics.types(device)
    yield compiler()
    yield triton()
    yield shared_memory()


def healthy(findings: list[Finding]) -> bool:
    """Whether nothing that Penstock requires is broken."""
    return not any(finding.required and finding.status == "broken" for finding in findings)


def _run(words: list[str]) -> tuple[int, str]:
    """Exit code and error output of a command; 1 and the reason where it could not be run."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SUBPROCESS_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as failure:
        return 1, str(failure)
    return done.returncode, done.stderr


def _program(area: str, name: str, program: str, detail: str, failed: str, remedy: str) -> Finding:
    """Whether a short program runs in a Python process of its own, so that a crash does not end this one. Where it
    fails, the last line of its traceback follows `failed`."""
    code, error = _run([sys.executable, "-c", program])
    if code == 0:
        return Finding(area, name, "ok", detail)
    lines = error.strip().splitlines() or ["it gave no reason"]
    return Finding(area, name, "broken", failed + first_line(lines[-1]), remedy)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def packages() -> Iterator[Finding]:
    """Python, and the packages that Penstock needs."""
    detail = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("versions", "python", "ok", detail, required=True)
    for name in ("penstock", *_CORE):
        required = name != "penstock"  # which has no metadata when it runs from a source tree
        if version := _version(name):
            yield Finding("versions", name, "ok", version, required=required)
        else:
            yield Finding("versions", name, "broken", "is not installed", f"pip install {name}", required)


def torch_itself() -> Finding:
    """Whether torch can be imported, and is not too old."""
    try:
        import torch
    except (ImportError, OSError) as error:
        remedy = "pip install --force-reinstall 'torch>=2.11'"
        return Finding("versions", "torch", "broken", first_line(error), remedy, required=True)
    hip = getattr(torch.version, "hip", None)
    built = f"ROCm {hip}" if hip else f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    detail = f"{torch.__version__}, built with {built}"
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= _TORCH_FLOOR:
        return Finding("versions", "torch", "ok", detail, required=True)
    remedy = "pip install --upgrade 'torch>=2.11'"
    return Finding("versions", "torch", "broken", detail, remedy, required=True)


def extras() -> Iterator[Finding]:
    """The packages of each extra; torchvision, whose wheel is linked against CUDA, is imported too: beside a CPU build
    of torch it breaks whatever imports it."""
    for name, extra, purpose in _OPTIONAL:
        if version := _version(name):
            yield Finding("extras", name, "ok", version)
        else:
            remedy = f"pip install 'penstock[{extra}]'"
            yield Finding("extras", name, "absent", f"would give {purpose}", remedy)
    if (version := _version("torchvision")) is None:
        yield Finding("extras", "torchvision", "absent", "not needed; only timm asks for it")
        return
    failed = f"{version} cannot be imported, which breaks transformers and timm too: "
    remedy = "pip uninstall torchvision, or install the build that fits this torch"
    program = "import torchvision; torchvision.ops.nms"
    yield _program("extras", "torchvision", program, version, failed, remedy)


def devices() -> Iterator[Finding]:
    """The processor and the GPUs, or why torch cannot use a GPU that is there."""
    import torch

    from penstock.report.record import processor

    name = f"{processor()} {torch.backends.cpu.get_cpu_capability()}"
    threads, cores = torch.get_num_threads(), os.cpu_count()
    yield Finding("devices", "cpu", "ok", f"{name}, {threads} threads on {cores} cores")
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


def _usable_devices() -> list[Any]:
    import torch

    gpus = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    return [torch.device("cpu"), *gpus]


def compiler() -> Finding:
    """Whether a C++ compiler builds what torch.compile writes for CPUs: OpenMP and Python's own headers."""
    usual = "clang++" if sys.platform == "darwin" else "g++"
    compiler = os.environ.get("CXX") or usual
    if shutil.which(compiler) is None and compiler != usual:
        wrong = f"CXX is {compiler}, which is no program: torch.compile accepts no arguments in it"
        return Finding(
            "compile", "C++ compiler", "broken", wrong, "unset CXX, or set it to the path of a compiler"
        )
    if shutil.which(compiler) is None:
        missing = f"torch.compile on CPUs needs {usual}, or another one that CXX names"
        remedy = "export CXX=clang++" if shutil.which("clang++") else "apt-get install g++"
        return Finding("compile", "C++ compiler", "absent", missing, remedy)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.cpp")
        source.write_text(
            "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
        )
        include = sysconfig.get_paths()["include"]
        code, error = _run([compiler, "-fopenmp", f"-I{include}", "-fsyntax-only", str(source)])
    if code == 0:
        return Finding("compile", "C++ compiler", "ok", shutil.which(compiler) or compiler)
    detail = f"{compiler} cannot build for torch.compile: {first_line(error)}"
    remedy = "apt-get install python3-dev" if "Python.h" in error else "apt-get install g++ libgomp1"
    return Finding("compile", "C++ compiler", "broken", detail, remedy)


def triton() -> Finding:
    """Whether Triton, which torch.compile needs on GPUs, can be imported."""
    import torch

    if version := _version("triton") or _version("pytorch-triton-rocm"):
        failed, remedy = f"{version} cannot be imported: ", "pip install --force-reinstall triton"
        return _program("compile", "triton", "import triton, triton.language", version, failed, remedy)
    if not torch.cuda.is_available():
        return Finding("compile", "triton", "absent", "only GPUs need it")
    return Finding("compile", "triton", "broken", "torch.compile on this GPU needs it", "pip install triton")


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
