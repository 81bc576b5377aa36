"""What a quarter of an hour on one GPU can answer: checks, then measurements, each part with a limit of its own.

    python benchmarks/gpu_minutes.py --minutes 13 --output out
    python benchmarks/gpu_minutes.py --output out                        # goes on with what is missing there
    python benchmarks/gpu_minutes.py --device cpu --small --output out   # tries every part on a CPU, in small form
    python benchmarks/gpu_minutes.py --output out --store h200           # copies the figures to benchmarks/results

Each part is a command of its own, so that one that fails or hangs costs its own time alone. While it runs, clock, power
and the busy cores of the host are read twice a second. A part's limit is its share of the minutes, and what earlier
parts left; a part that finds too little of it left is not begun. Everything is in `out/gpu_minutes.json`, written after
each part, which is all that has to be kept: what the parts wrote is in it, too. The last lines are a short table: what
came out, for how long, and at which clock and power.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.report.record import environment

HERE = Path(__file__).parent
ROOT = HERE.parent
FEWEST = 20.0
"""Seconds below which no part begins."""
SAMPLE = 0.5
"""Seconds between two readings of clock and power."""


@dataclass(frozen=True)
class Part:
    """One command, and how its figures are summed up."""

    name: str
    seconds: float
    """Its limit where 13 minutes are given; a share of them otherwise."""
    words: tuple[str, ...]
    """The command's arguments after `python`; names in braces are filled in, and what is empty then is left out."""
    small: tuple[str, ...] = ()
    """Arguments added to try it on a CPU."""
    file: str = ""
    """The JSON that it writes, as benchmarks/results calls it without the machine's name."""
    summary: Callable[[Any], str] = lambda found: ""
    """Its figures in one line."""


def _rungs(found: Any) -> str:
    rates = [each.get("images_per_second") for each in found["rungs"].values()]
    known = [rate for rate in rates if rate]
    return (
        f"{len(known)} of {len(rates)} rungs, the last {known[-1] / known[0]:.2f}× the first" if known else ""
    )


def _own_runs(found: Any) -> str:
    errors = [abs(case["step_error"]["median"]) for case in found["cases"]]
    within = sum(error <= 0.1 for error in errors)
    return f"{within} of {len(errors)} steps within 10 %, median error {statistics.median(errors):.0%}"


def _vit(found: Any) -> str:
    ours = [each for each in found["contestants"] if each["kind"] == "penstock" and not each["error"]]
    best = min(ours, key=lambda each: each["ms_per_step"]["median"])
    share = best["mfu_of_best_gemm"]
    return (
        f"{best['ms_per_step']['median']:.1f} ms, {share:.0%} of the best product, "
        f"{found['best_penstock_over_best_hand']['median']:.2f}× by hand"
    )


def _language(found: Any) -> str:
    cells = []
    for cell, each in found["cells"].items():
        if verdict := each.get("verdict"):
            hand = verdict.get("over_hand") or {}
            cells.append(f"{cell.partition(',')[0]} {hand.get('median', float('nan')):.2f}× by hand")
    return ", ".join(cells)


def _parts(found: Any) -> str:
    """The cell that was written last: the file has those of earlier parts, too."""
    cells = []
    for cell, each in list(found["cells"].items())[-1:]:
        far = sorted(each["parts"], key=lambda row: (row["least_milliseconds"] or 0.0) - row["milliseconds"])[
            :3
        ]
        rows = ", ".join(
            f"{row['name']} {row['milliseconds']:.1f} of {row['least_milliseconds'] or 0:.1f} ms"
            for row in far
        )
        cells.append(f"{cell.partition(',')[0]} {each['step_ms']:.1f} ms: {rows}")
    return "; ".join(cells)


def _kernels(found: Any) -> str:
    gains = [cell["speedup"] for cell in found["cells"] if cell.get("speedup")]
    return (
        f"{len(gains)} cells, {sum(gain > 1 for gain in gains)} faster than the best other" if gains else ""
    )


def _generate(found: Any) -> str:
    cells = []
    for cell in found["cells"]:
        times = {way: statistics.median(seconds) for way, seconds in cell["seconds"].items() if seconds}
        ours = min((t for way, t in times.items() if way.startswith("penstock")), default=None)
        others = [
            f"{min(their) / ours:.2f}× {rival}"
            for rival in ("transformers", "vllm")
            if ours and (their := [t for way, t in times.items() if way.startswith(rival)])
        ]
        cells.append(f"{cell['model']} × {cell['batch']}: {', '.join(others)}")
        cells += [f"no vllm: {cell['failed']['vllm']}"] if "vllm" in cell["failed"] else []
    return "; ".join(dict.fromkeys(cells))


def _eight_bits(found: Any) -> str:
    return "; ".join(
        f"{one['shape']['name']}: "
        + ", ".join(f"{name} {way['times_as_fast_as_bf16']:.2f}×" for name, way in one["block"].items())
        for one in found["results"]
        if one.get("block")
    )


def _settings(found: Any) -> str:
    """The step of the first Plan, and the speedup of each other by what it has and the first has not; or why none."""
    (cell,) = found["cells"].values()
    rows: list[str] = []
    shared: list[str] = []
    first = math.nan
    for one in cell["contestants"]:
        heat, words = one["heat"], [word for word in one["name"].split() if word not in shared]
        took = statistics.median(one["rounds"]) if one["rounds"] else heat.get("seconds", math.nan)
        shared, first = (shared, first) if rows else (words, took)
        why = heat.get("error") or ("" if took == took else heat.get("dropped", "not begun"))
        rows.append(f"{' '.join(words)} {why or f'{1e3 * took:.2f} ms, {first / took:.2f}×'}")
    return "; ".join(rows)


def _ladder(found: Any) -> str:
    return f"{found['speedup']:.2f}×: {found['plan']}"


def _vit_train(model: str, images: int, seconds: float) -> Part:
    return Part(
        f"{model}, {images} images", seconds,
        ("{benchmarks}/vit_train.py", "--model", model, "--batch", str(images), "--device", "{device}", "{compile}",
         "--rounds", "5", "--steps", "5", "--output", "{json}"),
        small=("--model", "vit-digits", "--batch", "4", "--rounds", "2", "--steps", "1", "--plan", "optimizer=fused"),
        file=f"vit_train_{model}_{images}", summary=_vit,
    )  # fmt: skip


def _language_train(model: str, tokens: int, sequence: int, seconds: float) -> Part:
    return Part(
        f"{model}, {tokens // sequence} × {sequence} tokens", seconds,
        ("{benchmarks}/language_train.py", "--device", "{device}", "--model", model, "--tokens", str(tokens),
         "--sequence", str(sequence), "--steps", "5", "--rounds", "5", "--seconds", "{seconds}", "--output", "{json}"),
        small=("--model", "gpt-tiny", "--tokens", "128", "--sequence", "64", "--steps", "1", "--rounds", "1",
               "--seconds", "20", "--plan", "optimizer=fused"),
        file="language_train", summary=_language,
    )  # fmt: skip


def _plans(name: str, model: str, tokens: int, sequence: int, seconds: float, *plans: str) -> Part:
    """Steps of one model under several Plans, of which the first is what the others are compared with."""
    return Part(
        name, seconds,
        ("{benchmarks}/language_train.py", "--device", "{device}", "--model", model, "--tokens", str(tokens),
         "--sequence", str(sequence), "--only", "penstock", *(word for plan in plans for word in ("--plan", plan)),
         "--steps", "5", "--rounds", "5", "--seconds", "{seconds}", "--output", "{json}"),
        small=("--model", "gpt-tiny", "--tokens", "128", "--sequence", "64", "--steps", "1", "--rounds", "1"),
        file=f"plans_{model}_{tokens}", summary=_settings,
    )  # fmt: skip


def _step_parts(model: str, samples: int, sequence: int, precision: str = "O1") -> Part:
    return Part(
        f"operators of {model}", 30,
        ("{benchmarks}/step_parts.py", "--device", "{device}", "--model", model, "--samples", str(samples),
         "--sequence", str(sequence), "--plan", "{plan} {whole} precision=" + precision, "--output", "{json}"),
        small=("--model", "gpt-tiny" if sequence else "vit-digits", "--samples", "2", "--sequence",
               str(sequence and 64)),
        file="step_parts", summary=_parts,
    )  # fmt: skip


BEST = "matmul=high optimizer=fused"
"""What the fastest Plans of earlier runs on such cards have, besides half precision."""
PARTS = (
    Part("ladder of ViT-H/16", 90, ("{benchmarks}/vit_h_ladder.py", "--device", "{device}", "--rounds", "3",
         "--output", "{json}"), small=("--small", "--rounds", "1"), file="vit_h_ladder", summary=_rungs),
    Part("checks", 150, ("-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "--maxfail", "20", "tests"),
         small=("-m", "not gpu", "-k", "config and rules")),
    Part("own runs, predicted", 110, ("{benchmarks}/predicted_own_runs.py", "--device", "{device}", "--rounds", "1",
         "--output", "{json}"), small=("--only", "vit-digits micro_batch=64"), file="predicted_own_runs",
         summary=_own_runs),
    _vit_train("vit-b16", 128, 60),
    _vit_train("vit-b16", 256, 60),
    _vit_train("vit-l16", 64, 60),
    _language_train("gpt2", 8192, 1024, 50),
    _language_train("gpt2", 16384, 1024, 50),
    _language_train("llama3-1b", 8192, 4096, 60),
    _step_parts("vit-b16", 256, 0),
    _step_parts("gpt2", 16, 1024),
    _step_parts("llama3-1b", 2, 4096, "O2"),
    Part("kernels", 70, ("{benchmarks}/kernels_gpu.py", "--minutes", "1", "--output", "{json}"), small=("--dry",),
         file="kernels", summary=_kernels),
    Part("8 bits", 40, ("{benchmarks}/eight_bits.py", "--device", "{device}", "--blocks", "--rounds", "10",
         "--output", "{json}"), small=("--smoke", "--emulate", "--eager", "--rounds", "2"), file="eight_bits",
         summary=_eight_bits),
    _plans("settings", "gpt2", 8192, 1024, 70, *(f"{{plan}} {{half}} {{whole}} {word}" for word in (
        "", "attention=flash", "attention=cudnn", "fuse=residual_norm", "products=int8_all", "products=fp8"))),
    _plans("CUDA graphs", "gpt2", 1024, 1024, 40, "{plan} {half} {whole}", "{plan} {half} {graphs}"),
    _plans("CUDA graphs, small", "gpt-tiny", 1024, 64, 25, "{plan} {half} {whole}", "{plan} {half} {graphs}"),
    Part("generation", 140, ("{benchmarks}/generate_gpu.py", "--models", "gpt2,llama3-1b", "--batches", "1,8,64",
         "--rounds", "3", "--device", "{device}", "--output", "{json}"),
         small=("--models", "gpt-tiny", "--batches", "1", "--prompt", "8", "--new", "4", "--rounds", "1"),
         file="generate", summary=_generate),
    Part("penstock ladder", 100, ("-m", "penstock", "ladder", "vit-b16", "--budget", "{budget}",
         "--output", "{folder}"), small=("--model.width", "64", "--model.depth", "2", "--model.heads", "2"),
         file="ladder", summary=_ladder),
    Part("penstock tune", 80, ("-m", "penstock", "tune", "--budget", "{budget}", "--output", "{folder}",
         "tests/tune/scripts/nanogpt.py", "--max_iters=1000000", "--device={device}", "--n_layer=12", "--n_head=12",
         "--n_embd=768", "--block_size=1024", "--batch_size=8"),
         small=("--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=32"), file="tune", summary=_ladder),
)  # fmt: skip
WHOLE = 780.0
"""Seconds that the parts' limits are shares of."""


@dataclass
class Outcome:
    """What came of a part."""

    status: str
    """done, failed (with its exit code), or stopped at its limit: what it had written then is kept."""
    seconds: float
    limit: float
    figures: str = ""
    readings: dict[str, Any] = field(default_factory=dict)
    """Median, least and most of the clock in MHz, the power in W and the busy cores of the host."""
    tail: str = ""
    """The end of its output."""


@contextlib.contextmanager
def read_while() -> Iterator[dict[str, list[float]]]:
    """Readings of clock, power and host, twice a second while this is entered; a CPU has the host's alone."""
    found: dict[str, list[float]] = {}
    over = threading.Event()

    def read() -> None:
        before = time.time(), _busy()
        while not over.wait(SAMPLE):
            now = time.time(), _busy()
            found.setdefault("host_cores", []).append((now[1] - before[1]) / (now[0] - before[0]))
            before = now
            if shutil.which("nvidia-smi"):
                query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
                done = subprocess.run(query, capture_output=True, text=True, check=False)
                for name, value in zip(("clock_mhz", "power_w"), done.stdout.partition("\n")[0].split(",")):
                    with contextlib.suppress(ValueError):
                        found.setdefault(name, []).append(float(value))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def _busy() -> float:
    """Seconds that this machine's cores were busy since it started."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + sum(rest[:3])) / os.sysconf("SC_CLK_TCK")


def run(part: Part, limit: float, device: str, output: Path, *, small: bool) -> Outcome:
    """Run one part, stop it at its limit, and read what it wrote."""
    folder = output / re.sub(r"[^A-Za-z0-9]+", "-", part.name)
    folder.mkdir(parents=True, exist_ok=True)
    target = output / f"{part.file}.json" if part.file else folder / "none.json"
    values = {
        "device": device, "json": str(target), "folder": str(folder), "seconds": f"{0.8 * limit:.0f}",
        "budget": f"{0.7 * limit:.0f}", "benchmarks": str(HERE), "compile": "" if small else "--compile",
        "plan": "optimizer=fused" if small else BEST, "whole": "" if small else "compile=whole",
        "graphs": "loss=chunked" if small else "compile=graphs", "half": "" if small else "precision=O1",
    }  # fmt: skip
    words = [word.format(**values) for word in (*part.words, *(part.small if small else ()))]
    words = [word for word in words if word]
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    log, start = folder / "log.txt", time.monotonic()
    with log.open("w") as stream, read_while() as readings:
        # A group of its own, so that what it started ends with it.
        process = subprocess.Popen(
            [sys.executable, *words], stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}, process_group=0,
        )  # fmt: skip
        try:
            code = process.wait(limit)
            status = "done" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            status = "stopped"
        finally:  # also where this process itself is asked to end
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = next(iter(folder.glob("*.json")), None) if not target.exists() else target
    if found is not None and found != target:
        shutil.copy(found, target)  # of commands that name their files themselves
    tail = log.read_text(errors="replace")[-3000:]
    figures = ""
    if found is not None and part.file:
        with contextlib.suppress(KeyError, ValueError, TypeError, IndexError):  # it was stopped half-way
            figures = part.summary(json.loads(found.read_text(encoding="utf-8")))
    elif lines := tail.strip().splitlines():
        figures = lines[-1]
    spread = {k: [statistics.median(v), min(v), max(v)] for k, v in readings.items() if v}
    return Outcome(status, time.monotonic() - start, limit, figures, spread, tail)


def table(outcomes: dict[str, Outcome]) -> str:
    """A line for each part, short enough for a terminal."""
    lines = [f"{'part':<28}{'':<12}{'s':>5}{'MHz':>6}{'W':>5}  figures"]
    for name, one in outcomes.items():
        clock, power = (one.readings.get(key, [0.0])[0] for key in ("clock_mhz", "power_w"))
        lines.append(
            f"{name:<28}{one.status:<12}{one.seconds:5.0f}{clock:6.0f}{power:5.0f}  {one.figures[:150]}"
        )
    return "\n".join(lines)


def results(output: Path) -> dict[str, Any]:
    """What the parts have written, by file."""
    files = {part.file: output / f"{part.file}.json" for part in PARTS if part.file}
    return {
        name: json.loads(path.read_text(encoding="utf-8")) for name, path in files.items() if path.exists()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=13.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", action="append", help="parts whose name contains this; may be given again")
    parser.add_argument("--small", action="store_true", help="each part in a form that a CPU can try")
    parser.add_argument(
        "--store", metavar="MACHINE", help="copy what is there to benchmarks/results, and end"
    )
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    output = options.output.absolute()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    output.mkdir(parents=True, exist_ok=True)
    kept, start = output / "gpu_minutes.json", time.monotonic()
    stored = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {"parts": {}, "results": {}}
    outcomes = {name: Outcome(**one) for name, one in stored["parts"].items()}
    for name, found in stored["results"].items():
        target = (
            HERE / "results" / f"{name}_{options.store}.json" if options.store else output / f"{name}.json"
        )
        if options.store or not target.exists():
            target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.store:
        print(table(outcomes))
        return
    left = 0.0
    """Seconds that parts did not need, which the next ones may."""
    for part in PARTS:
        if options.only and not any(word in part.name for word in options.only):
            continue
        if part.name in outcomes and outcomes[part.name].status == "done":
            continue
        until = start + 60 * options.minutes
        limit = min(part.seconds * 60 * options.minutes / WHOLE + left, until - time.monotonic())
        if limit < FEWEST:
            print(f"{part.name}: not begun, {limit:.0f} s are left", flush=True)
            continue
        one = outcomes[part.name] = run(part, limit, options.device, output, small=options.small)
        left = limit - one.seconds
        print(
            f"{part.name}: {one.status} after {one.seconds:.0f} s of {limit:.0f}: {one.figures[:150]}",
            flush=True,
        )
        report = {
            "parts": {name: asdict(each) for name, each in outcomes.items()},
            "results": results(output),
            "environment": environment(),
        }
        kept.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n" + table(outcomes))


if __name__ == "__main__":
    main()
