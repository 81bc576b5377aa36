"""The origin of a number: machine, versions, commit and command, for every result file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("penstock", "torch", "triton", "numpy", "safetensors", "transformers", "timm", "pillow")


def environment() -> dict[str, Any]:
    """Describe this process for a result file, as plain JSON values.

    Returns `machine` (system, processor, cores, memory, GPUs), `versions` (Python and the installed packages that can
    change a result), `commit` of the working tree that penstock is imported from (with `+changes` if files differ from
    it; None outside a repository), `command` that started the process, and `time` (UTC).
    """
    return {
        "machine": machine(), "versions": versions(), "commit": commit(), "command": command(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def machine() -> dict[str, Any]:
    """The hardware as the operating system reports it; `threads` is torch's number, if it is loaded."""
    hardware: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}", "processor": processor(), "cores": _cores(),
        "memory_bytes": memory_bytes(), "gpus": _gpus(),
    }  # fmt: skip
    torch = sys.modules.get("torch")
    if torch is not None:
        hardware["threads"] = int(torch.get_num_threads())
    return hardware


def versions() -> dict[str, str]:
    """Versions of Python, of each installed package of `PACKAGES`, and of CUDA if torch is loaded."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    if cuda:
        installed["cuda"] = str(cuda)
    return installed


def facts(recorded: Mapping[str, Any]) -> dict[str, str]:
    """An `environment` in words for a page, without its command."""
    machine = recorded.get("machine", {})
    threads = f", {machine['threads']} threads" if "threads" in machine else ""
    return {
        "processor": f"{machine.get('processor')}, {machine.get('cores')} cores{threads}",
        "memory": f"{(machine.get('memory_bytes') or 0) / 2**30:.1f} GiB",
        "GPU": "; ".join(machine.get("gpus") or ()) or "none",
        "system": str(machine.get("system")),
        "versions": ", ".join(f"{name} {version}" for name, version in recorded.get("versions", {}).items()),
        "commit": str(recorded.get("commit") or "none"),
        "time": str(recorded.get("time")),
    }


def command() -> str:
    """The command line of this process, to be typed again, without paths of this machine."""
    program, *arguments = sys.argv or [""]
    path = Path(program)
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    if module is not None and module.name:
        words = ["python", "-m", module.name.removesuffix(".__main__")]
    elif path.suffix == ".py":
        words = ["python", os.path.relpath(path) if path.is_absolute() else program]
    else:
        words = [path.name or "python"]
    return shlex.join([*words, *arguments])


def commit() -> str | None:
    """The commit of the repository that this package is in, or None if it is installed elsewhere."""
    here = Path(__file__).resolve().parent
    name = _output(["git", "rev-parse", "--short=12", "HEAD"], here)
    tracked = _output(["git", "ls-files", "--", Path(__file__).name], here)
    if not name or not tracked:  # a virtual environment inside another repository is not our commit
        return None
    changed = _output(["git", "status", "--porcelain", "--untracked-files=no"], here)
    return f"{name}+changes" if changed else name


def _output(words: list[str], folder: Path | None = None) -> str:
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def processor() -> str:
    """The CPU's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows
        return os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory of this computer, or the limit of its container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue  # no such limit, or the word "max"
    return total


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return [line.strip() for line in _output(query).splitlines() if line.strip()]
