"""Conversations as strangers keep them: calls of tools, marks of what is learned, columns beside the messages, and
templates of many forms. Token numbers are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config.model import PRESETS
from penstock.config.run import DataConfig
from penstock.data.text.chat import ChatWriter, Template, template_of, within
from penstock.data.text.conversations import give_template, open_conversations, open_preferences
from penstock.data.text.messages import conversation_of
from penstock.data.text.open import in_folder
from penstock.data.text.tokenizers import Bytes, Tokenizer
from penstock.errors import ConfigError, DataError
from penstock.train.prepare import write_beside

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<sop>"]
ASKS = '{% if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}'
TURN = "{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content }}{{ '<|im_end|>\\n' }}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + ASKS
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}" + ASKS
)
FULL = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>"
    "{{ m.role }}\n{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ m.name }}<|im_end|>\n{% endfor %}"
    + ASKS
)
GLM = (
    "<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
UNENDED = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"  # noqa: E501
OPENED = CHATML.replace('assistant\\n"', 'assistant\\n<think>\\n"')
CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"key": "k7"}'}}


def _called(content: str | None) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "k7?"},
        {"role": "assistant", "content": content, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]


def _pair(question: str, answer: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **fields}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with merges and special tokens."""
    library, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the value of one two three is"] * 9, trainer=trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>").save_pretrained(path)
    return path


def _with(folder: Path, template: Any) -> tuple[Tokenizer, Any]:
    """Our tokenizer and transformers' own, with a template."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = template
    ours = in_folder(folder)
    ours.chat_template = template
    return ours, theirs


def _write(rows: list[dict[str, Any]], folder: Path, name: str = "chat.jsonl") -> DataConfig:
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return DataConfig(source=f"text:{folder / name}", packed=False)


def _first(source: Any) -> Any:
    """The first sample, (1,)."""
    sample = np.zeros(1, source.sample)
    source.load(0, sample[0])
    return sample


def _shown(
    rows: list[dict[str, Any]], folder: Path, tokenizer: Tokenizer | None = None, **settings: Any
) -> str:
    """The first conversation of a file as it is trained on, with what is learned of it in [[ ]]."""
    tokenizer = tokenizer or Bytes()
    give_template(tokenizer, "auto")
    data = _write(rows * -(-5 // len(rows)), folder)
    data = DataConfig(source=data.source, packed=False, **settings)
    sample = _first(open_conversations(data, tokenizer, "train", length=400))
    words, text, inside = tokenizer.words(), "", False
    for token, learned in zip(sample["tokens"][0][sample["document"][0] >= 0], sample["learned"][0]):
        if learned != inside:
            text += "[[" if learned else "]]"
            inside = bool(learned)
        text += words[token].replace("Ċ", "\n").replace("Ġ", " ")
    return text + "]]" * inside


TOOLS = [{"type": "function", "function": {"name": "lookup"}}]


@pytest.mark.parametrize("template", [FULL, GLM.replace("{{ m.content }}", "{{ m | tojson }}"), "two"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": _called(None)},
        {"messages": _called(""), "tools": TOOLS},
        {"messages": _called("Let me look."), "tools": json.dumps(TOOLS)},
        {"messages": _pair("one?", "2", reasoning="one and one")},
        {
            "messages": [
                {"role": "user", "content": "hi", "name": "ann", "mood": "glad"},
                *_pair("b", "c")[1:],
            ]
        },
    ],
)
def test_token_numbers_are_those_of_transformers(
    row: dict[str, Any], template: str, folder: Path, tmp_path: Path
) -> None:
    several = [
        {"name": "default", "template": FULL},
        {"name": "tool_use", "template": "{{ tools | tojson }}\n" + FULL},
    ]
    ours, theirs = _with(folder, template)
    if template == "two":
        theirs.chat_template = {one["name"]: one["template"] for one in several}
        theirs.save_pretrained(tmp_path)
        ours = in_folder(tmp_path)
    beside = {name: row[name] for name in ("tools",) if name in row}
    found = conversation_of([row["messages"]], ["messages"], beside)
    wanted = theirs.apply_chat_template(row["messages"], tools=found.tools, return_dict=True)["input_ids"]
    model_template = template_of(ours)
    assert model_template is not None
    (whole,) = ChatWriter(model_template, ours.special_words()).write(*found.parts, found.tools)
    ((ids, places),) = ours.encode_marked([whole.text])
    assert ids.tolist() == list(wanted)
    assert any(within(places, whole.answers))


def test_answers_are_those_that_transformers_marks(folder: Path) -> None:
    ours, theirs = _with(folder, MARKED)
    messages = [
        {"role": "system", "content": "Be\n\nkind, ünd brief."},
        *_pair("\nhello", "  hello yourself"),
        *_pair("there", "user"),
    ]
    wanted = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    (whole,) = ChatWriter(Template(MARKED, ours.spelled()), ours.special_words()).write(messages)
    ((ids, places),) = ours.encode_marked([whole.text])
    assert ids.tolist() == list(wanted["input_ids"])
    assert [int(inside) for inside in within(places, whole.answers)] == list(wanted["assistant_masks"])


def test_a_call_of_a_tool_is_learned_in_every_form(tmp_path: Path) -> None:
    call = '[[<tool_call>\n{"name": "lookup", "arguments": {"key": "k7"}}\n</tool_call><end>]]'
    sharegpt = [
        {"from": "human", "value": "k7?"},
        {"from": "function_call", "value": '{"name": "lookup", "arguments": {"key": "k7"}}'},
        {"from": "observation", "value": "42"},
        {"from": "gpt", "value": "It is 42."},
    ]
    older = [
        {"role": "user", "content": "k7?"},
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "function", "name": "lookup", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    wanted = f"<|user|>Ċk7?<end>Ċ<|assistant|>Ċ{call}Ċ<|tool|>Ċ42<end>Ċ<|assistant|>Ċ[[It is 42.<end>]]Ċ"
    for row in ({"messages": _called("")}, {"messages": older}, {"conversations": sharegpt}):
        assert _shown([row], tmp_path) == wanted.replace("Ċ", "\n")
    assert "[[Let me look.<tool_call>" in _shown([{"messages": _called("Let me look.")}], tmp_path)
    sharegpt[1]["value"] = "lookup(k7)"
    with pytest.raises(DataError, match="a function_call holds no JSON"):
        _shown([{"conversations": sharegpt}], tmp_path)


def test_what_a_template_does_not_write_is_refused_or_named(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, _ = _with(folder, CHATML)
    with pytest.raises(DataError, match=r"does not write calls of tools \(tool_calls\).*data\.template"):
        _shown([{"messages": _called("Let me look.")}], tmp_path, ours)
    row = {"messages": _pair("a", "b", thinking="hm", mood="glad"), "tools": TOOLS}
    assert "[[b<|im_end|>]]" in _shown([row], tmp_path, ours)
    (said,) = [record.message for record in caplog.records if "does not write" in record.message]
    assert said == "The chat template does not write mood, thinking, tools, so the model does not see it."


@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"train": False}, {"loss_mask": 0}, {"training": False}, {"loss": False}]
)
def test_marked_turns_are_read_and_not_learned(mark: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"messages": [*_pair("1+1?", "3", **mark), *_pair("No.", "2", **dict.fromkeys(mark, 1))]}]
    assert _shown(rows, tmp_path).endswith("3<end>\n<|user|>\nNo.<end>\n<|assistant|>\n[[2<end>]]\n")


def test_odd_marks_are_refused_and_conversations_without_a_lesson_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DataError, match=r"the assistant's message has weight 0\.5; only 0 and 1"):
        _shown([{"messages": _pair("a", "b", weight=0.5)}], tmp_path)
    rows = [{"messages": _pair(f"{n}", "b", weight=n % 2)} for n in range(20)]
    source = open_conversations(_write(rows, tmp_path), _plain(), "train", length=60)
    assert len(source) == 8
    assert "10 conversations were left out: all their answers are marked as not to be learned" in caplog.text
    rows = [{"messages": [{"role": "user", "content": "a", "weight": 1}, *_pair("b", "c")[1:]]}]
    _shown(rows, tmp_path)
    assert "only the assistant's are" in caplog.text


def _plain() -> Tokenizer:
    tokenizer = Bytes()
    give_template(tokenizer, "auto")
    return tokenizer


@pytest.mark.parametrize("answer", ["", " \n"])
def test_an_empty_answer_is_refused(answer: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1 cannot be used: an answer of the assistant is empty"):
        _shown([{"messages": [*_pair("a", answer), *_pair("b", "c")]}], tmp_path)
    assert "[[c<end>]]" in _shown([{"messages": [*_pair("a", answer, weight=0), *_pair("b", "c")]}], tmp_path)


@pytest.mark.parametrize("label", [False, "False", 0])
def test_an_answer_that_is_labelled_as_bad_is_not_learned(label: Any, tmp_path: Path) -> None:
    row = {"prompt": "1+1?", "completion": "3", "label": label}
    with pytest.raises(DataError, match=r"its label is false: unpaired preferences \(KTO\) are not"):
        _shown([row], tmp_path)
    assert "[[3<end>]]" in _shown([row | {"label": True}], tmp_path)
    assert "[[3<end>]]" in _shown([row], tmp_path, columns=("prompt", "completion"))


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "2+2?", "input": "", "output": "4", "system": "S", "history": [["1+1?", "2"]]},
        {"system": "S", "messages": _pair("2+2?", "4"), "history": _pair("1+1?", "2")},
        {"system_prompt": "S", "question": "2+2?", "answer": "4", "history": json.dumps([["1+1?", "2"]])},
        {
            "system": "S",
            "messages": [{"role": "system", "content": "S"}, *_pair("1+1?", "2"), *_pair("2+2?", "4")],
        },
    ],
)
def test_system_and_history_are_read_in_their_own_columns(row: dict[str, Any], tmp_path: Path) -> None:
    turns = ["<|system|>ĊS<end>", "<|user|>Ċ1+1?<end>", "<|assistant|>Ċ[[2<end>]]"]
    wanted = "Ċ".join([*turns, "<|user|>Ċ2+2?<end>", "<|assistant|>Ċ[[4<end>]]Ċ"])
    assert _shown([row], tmp_path) == wanted.replace("Ċ", "\n")


def test_columns_beside_are_read_in_tables_and_others_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.csv").write_text("id,system,question,answer\n" + "7,S,a,b\n" * 10)
    source = open_conversations(DataConfig(source=f"text:{tmp_path}/a.csv"), _plain(), "train", length=99)
    sample = _first(source)
    assert Bytes().decode(sample["tokens"][0].tolist()).startswith("<|system|>\nS")
    rows = [{"messages": _pair("a", "b"), "id": n} for n in range(9)]
    _shown([*rows, {"messages": _pair("a", "b"), "extra": 1}], tmp_path)
    named = [record.message.split(": ", 1)[1] for record in caplog.records if "not read" in record.message]
    assert named == ["columns that are not read: 'id'."] * 2 + ["columns that are not read: 'extra'."]
    opened = [{"role": "system", "content": "T"}, *_pair("a", "b")]
    for row, problem in (
        ({"messages": opened, "system": "S"}, "another one in the column"),
        ({"messages": _pair("a", "b"), "tools": "lookup"}, "the column tools holds no JSON"),
        ({"messages": _pair("a", "b"), "history": [["a"]]}, "no pairs of a question and its answer"),
    ):
        with pytest.raises(DataError, match=problem):
            _shown([row], tmp_path)


def test_a_template_without_an_end_teaches_the_mark_that_follows(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, _ = _with(folder, GLM)
    rows = [{"messages": [*_pair("a", "b"), *_pair("c", "d")]}]
    wanted = "<sop><|user|>\na<|assistant|>\n[[b<|user|>]]\nc<|assistant|>\n[[d<|user|>]]"
    assert _shown(rows, tmp_path, ours) == wanted
    source = open_conversations(_write(rows * 5, tmp_path), ours, "train", length=99)
    assert [ours.words()[number] for number in source.ends] == ["<|user|>"]
    write_beside(PRESETS["gpt-tiny"], source, tmp_path / "beside")
    ends = json.loads((tmp_path / "beside" / "config.json").read_text())["eos_token_id"]
    assert [ours.words()[number] for number in ends] == ["<|im_end|>", "<|user|>"]
    assert "no special token" not in caplog.text
    ours, _ = _with(folder, UNENDED)
    assert "[[ b\n]]" in _shown(rows, tmp_path, ours)
    assert caplog.text.count("ends answers with no special token, so the model does not learn to stop") == 1


def test_a_template_that_opens_a_thought_trains_answers_that_have_one(folder: Path, tmp_path: Path) -> None:
    ours, _ = _with(folder, OPENED)
    with pytest.raises(
        DataError, match=r"lets an answer begin with '<think>\\n'.*Begin the answer with.*data\.template"
    ):
        _shown([{"messages": _pair("a", "b")}], tmp_path, ours)
    shown = _shown([{"messages": _pair("a", "<think>\nhm\n</think>\nb")}], tmp_path, ours)
    assert shown.endswith("<|im_start|>assistant\n<think>\n[[hm\n</think>\nb<|im_end|>]]\n")
    writer = ChatWriter(
        Template(CHATML.replace("{{ '<|im_end|>\\n' }}", "{{ '' if loop.last else '!' }}"), {}), []
    )
    with pytest.raises(ConfigError, match=r"does not write an answer where it lets one begin\. Name another"):
        writer.write(_pair("a", "b"))


def test_pairs_that_are_equal_within_the_length_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = ["x" * 60 * (n % 2) for n in range(20)]
    sides = [{"chosen": f"{text}good", "rejected": f"{text}bad"} for text in before]
    rows = [{"prompt": f"{n}", "system": "S", **side} for n, side in enumerate(sides)]
    source = open_preferences(_write(rows, tmp_path), _plain(), "train", length=70)
    assert len(source) == 8
    assert "8 of 16 pairs are left out, because their first 70 tokens are the same" in caplog.text
    with pytest.raises(DataError, match="no pair of different answers within its first 70 tokens, of 8"):
        open_preferences(_write(rows[1::2], tmp_path), _plain(), "train", length=70)


def test_nulls_of_a_table_of_arrow_do_not_reach_the_template(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    calls = [{"type": "function", "function": {"name": "f", "arguments": {name: "1"}}} for name in "ab"]
    rows = [{"messages": _pair("q", "", tool_calls=[call])} for call in calls * 10]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = open_conversations(DataConfig(source=f"text:{tmp_path}/a.parquet"), _plain(), "train", length=99)
    sample = _first(source)
    text = Bytes().decode(sample["tokens"][0].tolist())
    assert "null" not in text
    assert '"arguments": {"a": "1"}' in text


@pytest.mark.parametrize("name", ["make.py", "talk.txt"])
def test_conversations_are_not_read_of_a_text(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("print('a')\n")
    with pytest.raises(
        DataError, match=r"is no table. Conversations are read from files that end in .*jsonl"
    ):
        open_conversations(DataConfig(source=f"text:{tmp_path}/{name}"), _plain(), "train", length=99)
