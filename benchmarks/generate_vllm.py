"""vLLM as a contestant of `generate_gpu.py`: a process that keeps a model open and generates when it is asked.

    python benchmarks/generate_vllm.py FOLDER TOKENS    # the most tokens of a text, its prompt included

Each line of its input is a JSON object with `rows`, the prompts' tokens, and `new`, how many each gets. Each line of
its output that begins with `vllm-answer` is the answer: the seconds that it took, or what went wrong. vLLM's own log is
between them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MARK = "vllm-answer "
SHARE = 0.4
"""Share of the GPU's memory that it takes: other contestants are open beside it."""


def obstacle(device: str) -> str:
    """Why vLLM cannot be a contestant here; empty if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    return "" if device.startswith("cuda") else "vllm is measured on GPUs only"


def answer(lines: Iterable[str]) -> float:
    """The seconds in the next answer among the lines of the process's output. Raises RuntimeError with what went wrong,
    or with the last line of an output that ends."""
    last = "it wrote nothing"
    for line in lines:
        if line.startswith(MARK):
            reply = json.loads(line.removeprefix(MARK))
            if "error" in reply:
                raise RuntimeError(reply["error"])
            return float(reply["seconds"])
        last = line.strip() or last
    raise RuntimeError(f"vllm's process ended: {last}")


class Vllm:
    """A model that vLLM keeps open in a process of its own."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder), str(tokens)], text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def seconds(self, rows: list[list[int]], new: int) -> float:
        """Seconds in which it gives `new` tokens to each prompt, by its own clock."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # its last words say why
            self._process.stdin.write(json.dumps({"rows": rows, "new": new}) + "\n")
        return answer(self._process.stdout)

    def close(self) -> None:
        """End the process, which ends when its input does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    folder, tokens = sys.argv[1:]
    model = LLM(
        model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=int(tokens), seed=0,
        gpu_memory_utilization=SHARE, enable_prefix_caching=False,
    )  # fmt: skip
    for line in sys.stdin:
        asked = json.loads(line)
        greedy = SamplingParams(temperature=0.0, max_tokens=asked["new"], ignore_eos=True, detokenize=False)
        prompts = [TokensPrompt(prompt_token_ids=row) for row in asked["rows"]]
        start = time.perf_counter()
        done = model.generate(prompts, greedy, use_tqdm=False)
        reply: dict[str, Any] = {"seconds": time.perf_counter() - start}
        lengths = {len(one.outputs[0].token_ids) for one in done}
        if lengths != {asked["new"]}:
            reply = {"error": f"it generated {sorted(lengths)} tokens, not {asked['new']}"}
        print(MARK + json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
