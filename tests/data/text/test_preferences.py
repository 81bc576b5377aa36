"""Pairs of conversations: what is read of data sets, and which answers are compared."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.data.text.chat import PLAIN, ChatWriter, Template
from penstock.data.text.messages import Message, conversation_of
from penstock.errors import ConfigError


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


ASKED, GOOD, BAD = _said("user", "3 + 4?"), _said("assistant", "7"), _said("assistant", "8")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "3 + 4?", "chosen": "7", "rejected": "8"},
        {"prompt": [ASKED], "chosen": "7", "rejected": "8"},
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        {
            "conversations": [{"from": "human", "value": "3 + 4?"}],
            "chosen": {"from": "gpt", "value": "7"},
            "rejected": BAD,
        },
        {"prompt": "3 + 4?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"chosen": json.dumps([ASKED, GOOD]), "rejected": json.dumps([ASKED, BAD])},
    ],
)
def test_the_usual_forms_are_read(row: dict[str, Any]) -> None:
    found = conversation_of(list(row.values()), list(row), {}, compared=True)
    assert found.parts == ([ASKED], [GOOD], [BAD])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD]}, "chosen and rejected are the same"),
        ({"chosen": [ASKED, GOOD], "rejected": [_said("user", "?"), BAD]}, "share no beginning"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED]}, "rejected has no answer"),
        ({"chosen": [ASKED, GOOD]}, "1 columns are named"),
        ({"chosen": "7", "rejected": "8"}, "chosen holds no list of messages"),
        ({"prompt": "3 + 4?", "chosen": "7", "rejected": " "}, "rejected is empty"),
        ({"prompt": "3 + 4?", "chosen": 7, "rejected": "8"}, "chosen is int, not text"),
        ({"prompt": "5?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "without the prompt"),
    ],
)
def test_what_is_no_pair_is_said(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        conversation_of(list(row.values()), list(row), {}, compared=True)


def test_answers_behind_the_shared_beginning_are_marked() -> None:
    template = Template(PLAIN, {"eos_token": "<end>"})
    messages = [ASKED, GOOD, ASKED, BAD, ASKED, GOOD]
    for begin, expected in ((2, ["8<end>", "7<end>"]), (4, ["7<end>"])):
        whole = ChatWriter(template, ["<end>"]).write_from(messages, begin)
        assert whole is not None
        assert [whole.text[slice(*answer)] for answer in whole.answers] == expected
    # A template that leaves earlier answers' thoughts out.
    thinking = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}[thinks]{% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    writer = ChatWriter(Template(thinking, {}), [])
    last = writer.write_from(messages, 4)
    assert last is not None
    assert len(last.answers) == 1
    with pytest.raises(ConfigError, match="only one may be compared"):
        writer.write_from(messages, 2)
