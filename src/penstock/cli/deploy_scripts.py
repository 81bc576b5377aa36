"""Programs that answer texts in CTranslate2 and ONNX Runtime with what `penstock deploy` has chosen."""

from __future__ import annotations

import shlex
from pathlib import Path
from string import Template

from penstock.config.machine import Machine
from penstock.config.model import Seq2SeqConfig, positions
from penstock.infer.deploy import Layout
from penstock.infer.settings import DeployConfig
from penstock.planner.serve import generates

_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
_SHELL = Template("""\
#!/bin/sh
# $library: writes the model's files beside this one, then answers texts from standard input, one a line.
set -e
here=$$(dirname "$$0")
penstock export $weights "$$here/$form" --to $form$type >&2
exec python "$$here/$program"
""")
_HEAD = '''\
"""Answers texts from standard input, one a line, in $library, with what penstock deploy chose."""

import os
import sys
from pathlib import Path

$imports
from tokenizers import Tokenizer

FOLDER = Path(__file__).parent / "$form"
BATCH, MOST, THREADS = $batch, $most, os.cpu_count()
words = Tokenizer.from_file($tokenizer)
END = words.id_to_token($end)
lines = [line for line in sys.stdin.read().splitlines() if line]
if not lines:
    sys.exit("Give texts on standard input, one a line.")
'''
_CT_DECODER = """
model = ctranslate2.Generator(str(FOLDER), device="$device", compute_type="$type", intra_threads=THREADS)
prompts = [words.encode(line).tokens for line in lines]
most = MOST - max(map(len, prompts))
for one in model.generate_batch(prompts, max_batch_size=BATCH, max_length=most, include_prompt_in_result=False):
    print(words.decode(one.sequences_ids[0]))
"""
_CT_BOTH = """
model = ctranslate2.Translator(str(FOLDER), device="$device", compute_type="$type", intra_threads=THREADS)
sources = [words.encode(line).tokens for line in lines]
sources = [row if row[-1:] == [END] else [*row, END] for row in sources]
for one in model.translate_batch(sources, max_batch_size=BATCH, max_decoding_length=MOST - 1, beam_size=1):
    print(words.decode([words.token_to_id(word) for word in one.hypotheses[0]]))
"""
_ONNX = '''
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = THREADS


def opened(name):
    return onnxruntime.InferenceSession(str(FOLDER / name), options, providers=["CPUExecutionProvider"])


def padded(rows, first):
    """Rows of one length with zeros in front (or behind), and a mask that is 0 where they are."""
    width = max(map(len, rows))
    def filled(row, fill):
        return [*fill, *row] if first else [*row, *fill]
    tokens = [filled(row, [0] * (width - len(row))) for row in rows]
    mask = [filled([1] * len(row), [0] * (width - len(row))) for row in rows]
    return np.array(tokens, np.int64), np.array(mask, np.int64)


def answered(rows):
    """The likeliest tokens, up to the end of each text."""
$begin
    ended, made = np.zeros(len(rows), bool), [[] for _ in rows]
    for _ in range(most):
        logits, *present = decoder.run(None, {"input_ids": tokens, **masks, **kept, **memory})
        kept = dict(zip(kept, present))
        tokens = logits[:, -1:].argmax(-1)
        ended |= tokens[:, 0] == words.token_to_id(END)
        if ended.all():
            break
        for row, number, over in zip(made, tokens[:, 0], ended):
            row += [] if over else [int(number)]
$grow
    return made


def empty(rows):
    given = [one for one in decoder.get_inputs() if one.name.startswith("past") and ".encoder." not in one.name]
    return {one.name: np.zeros((rows, one.shape[1], 0, one.shape[3]), np.float32) for one in given}


decoder = opened("decoder_with_past_model.onnx")
$open
for begin in range(0, len(lines), BATCH):
    rows = [words.encode(line).ids for line in lines[begin : begin + BATCH]]
    for numbers in answered(rows):
        print(words.decode(numbers))
'''
_ONNX_DECODER = {
    "begin": """\
    tokens, mask = padded(rows, first=True)
    masks, memory, kept = {"attention_mask": mask}, {}, empty(len(rows))""",
    "grow": """\
        seen = np.ones((len(rows), 1), np.int64)
        masks = {"attention_mask": np.concatenate([masks["attention_mask"], seen], axis=1)}""",
    "open": "most = MOST - max(len(words.encode(line).ids) for line in lines)",
}
_ONNX_BOTH = {
    "begin": """\
    end = words.token_to_id(END)
    source, mask = padded([row if row[-1:] == [end] else [*row, end] for row in rows], first=False)
    names = [one.name for one in decoder.get_inputs() if ".encoder." in one.name]
    memory = dict(zip(names, encoder.run(None, {"input_ids": source, "attention_mask": mask})))
    tokens, masks = np.full((len(rows), 1), $start), {"encoder_attention_mask": mask}
    kept = empty(len(rows))""",
    "grow": "",
    "open": 'encoder, most = opened("encoder_model.onnx"), MOST - 1',
}


def scripts_for(asked: DeployConfig, machine: Machine, layout: Layout) -> dict[str, str]:
    """Names and texts of files, for a folder of weights with a `tokenizer.json`, of which a replica is one device."""
    assert asked.model is not None
    weights = Path(asked.weights or "")
    one = asked.weights is not None and layout.tp * layout.pp == 1 and generates(asked.model)
    if not one or not (weights / "tokenizer.json").is_file():
        return {}
    # Imported here, because they take torch, which the search does without.
    from penstock.infer.ctranslate import lacking
    from penstock.infer.load import marks_of

    start, ends = marks_of(weights)
    both = isinstance(asked.model, Seq2SeqConfig)
    if not ends or (both and start is None):
        return {}
    known: dict[str, object] = {
        "weights": shlex.quote(str(weights)), "tokenizer": repr(str((weights / "tokenizer.json").resolve())),
        "batch": layout.slots, "most": min(layout.context, positions(asked.model)[-1]), "end": ends[0],
        "start": start, "device": machine.device,
    }  # fmt: skip
    found: dict[str, str] = {}
    on_cpu = ("fp32", "int8")
    if layout.type in (on_cpu if machine.device == "cpu" else _TYPES) and not list(lacking(asked.model)):
        told = known | {"library": "CTranslate2", "form": "ctranslate2", "type": _TYPES[layout.type]}
        told |= {"imports": "import ctranslate2"}
        found |= _pair(told, _CT_BOTH if both else _CT_DECODER, f" --type {layout.type}")
    if layout.type == "fp32" and machine.device == "cpu":
        parts = _ONNX_BOTH if both else _ONNX_DECODER
        parts = {name: Template(text).safe_substitute(known) for name, text in parts.items()}
        told = known | {"library": "ONNX Runtime", "form": "onnx-cache", **parts}
        told |= {"imports": "import numpy as np\nimport onnxruntime"}
        found |= _pair(told, _ONNX, "")
    return found


def _pair(told: dict[str, object], body: str, type: str) -> dict[str, str]:
    """The command that starts a program, and the program."""
    name = str(told["library"]).lower().replace(" ", "")
    program = f"run_{name}.py"
    shell = _SHELL.substitute(told | {"program": program, "type": type})
    return {f"{name}.sh": shell, program: Template(_HEAD + body).substitute(told)}
