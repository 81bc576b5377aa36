"""Conversations: what is read of data sets, what is learned of them, and that packing changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.cli import main
from penstock.config.model import DecoderConfig
from penstock.config.run import DataConfig
from penstock.data.text.chat import PLAIN, ChatWriter, Template, template_of, within
from penstock.data.text.conversations import fitted, give_template, open_conversations
from penstock.data.text.messages import conversation_of
from penstock.data.text.open import in_folder
from penstock.data.text.tokenizers import Bytes, Tokenizer
from penstock.errors import ConfigError, DataError
from penstock.kernels.cross_entropy import IGNORED
from penstock.models import create
from penstock.tasks import Chat
from penstock.tasks.chat import prepare_chat
from penstock.tasks.text import first_samples

ASKED = [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "7"}]
SMALL = DecoderConfig(width=16, depth=2, heads=2, mlp_width=32, sequence=160, vocabulary=368)
THINKING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.last %}[thinks]{% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": ASKED},
        {"messages": json.dumps(ASKED)},
        {"conversations": [{"from": "human", "value": "3 + 4?"}, {"from": "gpt", "value": "7"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "3 + 4?"}]}, ASKED[1]]},
        {"prompt": "3 + 4?", "completion": "7"},
        {"prompt": ASKED[:1], "completion": ASKED[1:]},
        {"instruction": "3 + 4?", "input": "", "output": "7"},
    ],
)
def test_the_usual_forms_are_read(row: dict[str, Any]) -> None:
    assert conversation_of(list(row.values()), list(row), {}).parts == (ASKED,)


def test_an_alpaca_input_follows_its_instruction() -> None:
    ((asked, answer),) = conversation_of(["Add.", "3, 4", "7"], ["instruction", "input", "output"], {}).parts
    assert (asked["content"], answer["content"]) == ("Add.\n\n3, 4", "7")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (["hello"], "no list of messages"),
        ([[{"content": "a"}]], "has no role"),
        ([[{"role": "user"}]], "has no content"),
        (["", "7"], "is empty"),
        ([3, "7"], "is int, not text"),
        ([[{"role": "user", "content": [{"type": "image"}]}]], "not text"),
    ],
)
def test_what_is_no_conversation_is_said(values: list[Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        conversation_of(values, ["messages"] if len(values) == 1 else ["prompt", "completion"], {})


def test_answers_are_marked_to_the_end_of_their_turn() -> None:
    template = Template(PLAIN, {"eos_token": "<end>"})
    (whole,) = ChatWriter(template, ["<end>"]).write([*ASKED, *ASKED])
    assert [whole.text[begin:end] for begin, end in whole.answers] == ["7<end>", "7<end>"]
    assert list(within([(0, 1), (2, 4), (4, 5), (6, 8)], [(2, 5), (7, 9)])) == [False, True, True, False]


def test_answers_that_are_later_written_otherwise_are_texts_of_their_own() -> None:
    parts = ChatWriter(Template(THINKING, {}), []).write([*ASKED, *ASKED])
    assert [part.text[slice(*part.answers[0])] for part in parts] == ["[thinks]7\n"] * 2
    assert parts[1].text.count("[thinks]") == 1


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (ASKED[:1], "no answer"),
        (ASKED[1:], "no answer"),
        ([{"role": "user", "content": "<end>"}, ASKED[1]], "spells the special token <end>"),
    ],
)
def test_a_conversation_that_teaches_nothing_or_too_much_is_refused(
    messages: list[dict[str, str]], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        ChatWriter(Template(PLAIN, {"eos_token": "<end>"}), ["<end>"]).write(messages)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/hostname' %}",
        "{% for n in range(1000000) %}.{% endfor %}",
    ],
)
def test_a_template_from_outside_reaches_only_the_messages(text: str) -> None:
    with pytest.raises(ConfigError, match="chat template does not take these messages: "):
        Template(text, {}).text(ASKED)


def test_groups_hold_every_row_once_and_no_more_than_fits() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    groups = fitted(lengths, np.arange(500), 128)
    assert sorted(np.concatenate(groups).tolist()) == list(range(500))
    assert max(lengths[group].sum() for group in groups) <= 128
    assert len(groups) <= 1.03 * lengths.sum() / 128


def _file(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return f"text:{path}"


def _tokenizer() -> Tokenizer:
    tokenizer = Bytes()
    give_template(tokenizer, "auto")
    return tokenizer


def test_packed_conversations_do_not_see_each_other(tmp_path: Path) -> None:
    """The loss of samples that hold several is the mean over all answers, as of one in each; and so are gradients."""
    rows = [{"prompt": f"{n} + {n % 5}?" * (1 + n % 3), "completion": f"{n + n % 5}"} for n in range(40)]
    data = DataConfig(source=_file(tmp_path, rows))
    torch.manual_seed(0)
    model = create(SMALL, dtype=torch.float64).eval()
    found = []
    for packed in (True, False):
        source = open_conversations(
            data if packed else DataConfig(source=data.source, packed=False),
            _tokenizer(),
            "train",
            length=161,
        )
        assert (len(source) < 20) == packed
        batch = prepare_chat(first_samples(source, len(source)), torch.device("cpu"))
        assert (batch.inputs[1] is not None) == packed
        model.zero_grad()
        loss = model(*batch.inputs) / batch.count
        loss.backward()
        found.append((batch.count, batch.tokens, loss.item(), [p.grad.clone() for p in model.parameters()]))
        targets = batch.inputs[2]
        said = Bytes().decode(targets[targets != IGNORED].tolist())
        learned = [row["completion"] for row in rows if int(row["prompt"].split(" ")[0]) % 5 != 4]
        assert sorted(said) == sorted("".join(learned))
    (count, tokens, loss, gradients), (other_count, other_tokens, other_loss, others) = found
    assert (count, tokens) == (other_count, other_tokens)
    assert loss == pytest.approx(other_loss, rel=1e-10)
    for ours, theirs in zip(gradients, others, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


def test_a_long_conversation_is_cut_and_left_out_without_an_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"{n:02}" + "a" * (8 + 50 * (n % 2)), "completion": "b" * 30} for n in range(20)]
    source = open_conversations(DataConfig(source=_file(tmp_path, rows)), _tokenizer(), "train", length=60)
    assert "cut at their end, and 8 that then have no answer are left out" in caplog.text
    assert len(source) == 8
    with pytest.raises(
        DataError, match=r"no conversation with an answer within its first 12 tokens, of 16; make"
    ):
        open_conversations(DataConfig(source=_file(tmp_path, rows)), _tokenizer(), "train", length=12)


def test_a_bad_row_is_named_and_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "a", "completion": "b"}] * 300
    data = DataConfig(source=_file(tmp_path, [*rows, {"prompt": "<end>", "completion": "b"}]))
    with pytest.raises(DataError, match="line 301 cannot be used: a message spells the special token <end>"):
        open_conversations(data, _tokenizer(), "train", length=60)
    open_conversations(DataConfig(source=data.source, bad_rows="skip"), _tokenizer(), "train", length=60)
    assert "Left out" in caplog.text


def test_columns_inside_others_are_read(tmp_path: Path) -> None:
    rows = [{"pair": {"ask": f"{n}?", "say": "yes"}} for n in range(20)]
    data = DataConfig(source=_file(tmp_path, rows), columns=("pair.ask", "pair.say"))
    assert len(open_conversations(data, _tokenizer(), "train", length=60)) == 16


@pytest.mark.parametrize("form", ["list", "parquet", "hub"])
def test_conversations_are_the_same_in_every_kind_of_file(form: str, tmp_path: Path) -> None:
    rows = [{"messages": [ASKED[0] | {"content": f"{n}?"}, ASKED[1]], "source": "x"} for n in range(20)]
    wanted = open_conversations(DataConfig(source=_file(tmp_path, rows)), _tokenizer(), "train", length=60)
    if form == "list":
        (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
        source = f"text:{tmp_path}/a.json"
    elif form == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        # A table has every field in every message.
        named = [{**row, "messages": [{**turn, "name": None} for turn in row["messages"]]} for row in rows]
        parquet.write_table(pyarrow.Table.from_pylist(named), tmp_path / "a.parquet")
        source = f"text:{tmp_path}/a.parquet"
    else:
        pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
        source = f"hf:{tmp_path}/saved"
    read = open_conversations(DataConfig(source=source), _tokenizer(), "train", length=60)
    ours, theirs = (np.zeros(len(wanted), wanted.sample) for _ in range(2))
    assert len(read) == len(wanted) > 3
    read.read_into(np.arange(len(read)), ours)
    wanted.read_into(np.arange(len(read)), theirs)
    assert ours.tobytes() == theirs.tobytes()


def test_without_conversations_the_task_says_how_to_name_some(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--data text:FILE\.jsonl"):
        Chat().open(DataConfig(), SMALL, "train")
    with pytest.raises(DataError, match="no known columns of messages, or of a question and its answer"):
        Chat().open(DataConfig(source=_file(tmp_path, [{"a": "b"}])), SMALL, "train")


@pytest.mark.usefixtures("known_machine")
def test_a_model_is_tuned_exported_with_its_template_and_asked(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n % 9}?", "completion": "yes" if n % 2 else "no"} for n in range(400)]
    sizes = {"width": 32, "depth": 1, "heads": 2, "mlp_width": 32, "sequence": 96}
    command = [
        "train", "gpt-tiny", "--task", "chat", "--data", _file(tmp_path, rows), "--output", f"{tmp_path}/run",
    ]  # fmt: skip
    command += [f"--model.{name}={size}" for name, size in sizes.items()]
    command += ["--recipe.steps=12", "--plan.micro_batch=8", "--device=cpu"]
    assert main(command) == 0
    export = tmp_path / "run" / "export"
    from penstock.serve.parse import chat

    tokenizer = in_folder(export)
    asked = chat({"messages": ASKED[:1]}, template_of(tokenizer), {})
    assert asked.marked
    ids = tokenizer.encode_marked([str(asked.prompts[0])])[0][0].tolist()
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(export)
    assert ids == list(theirs.apply_chat_template(ASKED[:1], add_generation_prompt=True)["input_ids"])
    assert tokenizer.end in ids
