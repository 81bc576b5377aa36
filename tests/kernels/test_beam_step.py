"""A step of beam search: codes of texts that ended, and Triton's kernels against the plain form."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.kernels.beam_step import beam_step, plain_step, texts_of
from penstock.kernels.beams import NOTHING, Beams, Step, Terms
from penstock.kernels.remainder_adamw import have_triton
from penstock.kernels.top import likeliest

needs_triton = pytest.mark.skipif(not have_triton(), reason="Triton is not installed (pip install triton)")
CASES = [
    (50, Terms(size=3, steps=9, stops=(4,))),
    (50, Terms(size=4, steps=7, stops=(1, 8, 9), length_penalty=0.6, stopping="never")),
    (70, Terms(size=1, steps=6, stops=(3,), stopping="full")),
    (40, Terms(size=5, steps=5)),
    (5000, Terms(size=4, steps=6, stops=(2,), length_penalty=-1.0, stopping="full")),
]
"""A vocabulary and the terms of a search over it; the last takes two programs for each beam."""


def logits_of(rows: int, words: int, terms: Terms, draw: random.Random, device: str) -> Tensor:
    """Drawn ones, among which texts often end."""
    found = torch.randn(rows, words, generator=torch.Generator().manual_seed(draw.randrange(1 << 30))) * 3
    for stop in terms.stops:
        found[:, stop] += 5 * (torch.rand(rows, generator=torch.Generator().manual_seed(stop)) < 0.5)
    found[:, 0] = -torch.inf
    return found.to(device)


def check_against_the_plain_form(device: str) -> None:
    """Whole searches, each step by both forms."""
    draw = random.Random(0)
    for words, terms in CASES:
        for normed in (False, True):
            beams = Beams.first(3, terms.size, torch.float32, torch.device(device))
            ended = 0
            for step in range(terms.steps):
                logits = logits_of(3 * terms.size, words, terms, draw, device)
                logits = torch.log_softmax(logits, -1) if normed else logits
                expected = plain_step(logits, beams, step, terms, normed=normed)
                found = beam_step(logits, beams, step, terms, normed=normed)
                assert not found.beams.fresh, "this is the plain form"
                _same(found, expected, last=step + 1 == terms.steps)
                beams = expected.beams
                ended = int(beams.finished.sum())
            assert ended == 3 * terms.size


def _same(found: Step, expected: Step, *, last: bool) -> None:
    torch.testing.assert_close(found.beams.done_scores, expected.beams.done_scores)
    there = expected.beams.finished
    assert torch.equal(found.beams.finished, there)
    assert torch.equal(found.beams.done[there], expected.beams.done[there])
    if last:
        return
    torch.testing.assert_close(found.beams.scores, expected.beams.scores)
    assert torch.equal(found.parents, expected.parents)
    assert torch.equal(found.chosen, expected.chosen)
    # The plain form on a CPU does not look ahead while nothing has ended.
    assert torch.equal(found.beams.hopeful, expected.beams.hopeful)


def test_texts_are_read_back_from_codes() -> None:
    draw, beams, steps = random.Random(1), 3, 6
    texts: list[list[list[int]]] = [[[] for _ in range(beams)] for _ in range(2)]
    parents, chosen, codes, expected = [], [], [], []
    for step in range(steps):
        beam, ends = draw.randrange(beams), draw.random() < 0.5
        last = draw.randrange(99)
        told = [[*text[beam], *([] if ends else [last])] for text in texts]
        expected.append([[*text, *[NOTHING] * (steps - len(text))] for text in told])
        codes.append([(step << 40) + (beam << 32) + (0 if ends else last + 1)] * 2)
        lines = [[draw.randrange(beams) for _ in range(beams)] for _ in range(2)]
        tokens = [[draw.randrange(99) for _ in range(beams)] for _ in range(2)]
        texts = [
            [[*text[line], token] for line, token in zip(*both, strict=True)]
            for text, *both in zip(texts, lines, tokens, strict=True)
        ]
        parents.append(torch.tensor(lines))
        chosen.append(torch.tensor(tokens))
    found = texts_of(torch.tensor(codes).T, parents, chosen, steps)
    assert found.transpose(0, 1).tolist() == expected


@pytest.mark.parametrize("size", [58_101, 300, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_likeliest_are_those_of_a_softmax(size: int, dtype: torch.dtype) -> None:
    x = torch.randn(9, size).to(dtype)
    x[:, 0] = -torch.inf
    values, places = likeliest(x, 6)
    expected = torch.log_softmax(x, -1, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(values, expected.topk(6).values)
    torch.testing.assert_close(expected.gather(1, places), values)


@pytest.mark.slow
@needs_triton
def test_triton_equals_the_plain_form_in_the_interpreter() -> None:
    program = (
        "import importlib.util, sys, torch\n"
        "torch.set_num_threads(1)\n"
        f"spec = importlib.util.spec_from_file_location('case', {str(Path(__file__))!r})\n"
        "case = importlib.util.module_from_spec(spec)\n"
        "sys.modules['case'] = case\n"
        "spec.loader.exec_module(case)\n"
        "case.check_against_the_plain_form('cpu')\n"
        "print('all equal')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "all equal"


@needs_triton
def test_triton_compiles_for_hopper(tmp_path: Path) -> None:
    program = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from penstock.kernels.triton import beam_step as module
first = dict(logits="*fp32", largest="*fp32", sums="*fp32", values="*fp32", tokens="*i32", size="i32")
state = dict(scores="*fp32", done_scores="*fp32", done="*i64", finished="*i8", hopeful="*i8")
second = {k: v for k, v in first.items() if k not in ("logits", "size")} | state | dict(stops="*i64")
second |= {f"new_{name}": kind for name, kind in state.items()} | dict(parents="*i64", chosen="*i64")
second |= dict(step="i32", last="i32", divisor="fp32", ahead="fp32", parts="i32", each="i32")
found = {}
for beams, kept, words in ((4, 8, 58_101), (16, 32, 151_936)):
    parts = -(-words // module.SPAN)
    wide = lambda number: 1 << (number - 1).bit_length()
    kernels = {
        "candidates_kernel": (first, dict(SPAN=module.SPAN, KEPT=kept)),
        "merge_kernel": (second, dict(
            BEAMS=beams, KEPT=kept, ENDS=1, NORMED=False, FULL=True, BEAMS_WIDE=wide(beams), PARTS_WIDE=wide(parts),
            EACH_WIDE=wide(parts * kept), KEPT_WIDE=wide(kept),
        )),
    }
    for name, (types, constants) in kernels.items():
        kernel = getattr(module, name)
        signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs={})
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=8))
        found[f"{name} {beams}"] = dict(shared=made.metadata.shared, cubin=len(made.asm["cubin"]))
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) == 4
    for facts in found.values():
        assert facts["cubin"] > 0
        assert facts["shared"] <= 232_448


@pytest.mark.gpu
@needs_triton
def test_triton_equals_the_plain_form_on_a_gpu() -> None:
    check_against_the_plain_form("cuda")
