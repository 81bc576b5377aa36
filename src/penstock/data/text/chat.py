"""Conversations: the forms in which data sets keep them, and the text that a model's chat template makes of one."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from penstock.data.text.tokenizers import Tokenizer
from penstock.errors import ConfigError

Message = dict[str, str]
"""One turn: `role` (system, user, assistant, tool) and `content`."""
PLAIN = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""The template of a model that has none: each turn below its role, ended by the tokenizer's own end."""
_ROLES = {
    **dict.fromkeys(("gpt", "bot", "model", "chatgpt"), "assistant"), "human": "user",
    **dict.fromkeys(("function", "function_call", "observation", "tool_response", "ipython"), "tool"),
}  # fmt: skip
"""Words for roles in the form that ShareGPT's data sets have."""


class Template:
    """A model's chat template, which turns messages into a text. It comes from outside, so it runs in a sandbox."""

    def __init__(self, text: str, specials: Mapping[str, str]) -> None:
        """`specials` are the names that it uses for special tokens, such as `eos_token`. Raises ConfigError for one
        that is no template."""
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals |= {"raise_exception": _refuse, "strftime_now": time.strftime}
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        # transformers' own tag marks the model's answers, for training.
        text = re.sub(r"({%-?\s*)generation(\s*-?%})", r"\1if true\2", text)
        text = re.sub(r"({%-?\s*)endgeneration(\s*-?%})", r"\1endif\2", text)
        self._specials = dict(specials)
        try:
            self._template = environment.from_string(text)
        except TemplateError as problem:
            raise ConfigError(f"The model's chat template cannot be used: {problem}.") from None

    def text(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> str:
        """The text of some messages; with `answer`, up to where the model's next answer begins. Raises ConfigError
        where the template does not take them."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=answer, **self._specials)
        except ConfigError:
            raise
        except Exception as problem:  # noqa: BLE001 (a template may raise anything)
            raise ConfigError(f"The model's chat template does not take these messages: {problem}.") from None


def _refuse(why: str) -> None:
    raise ConfigError(f"The model's chat template does not take these messages: {why}")


def template_of(tokenizer: Tokenizer) -> Template | None:
    """A tokenizer's chat template, None if it has none. Raises ConfigError for one that cannot be used."""
    if tokenizer.chat_template is None:
        return None
    return Template(tokenizer.chat_template, tokenizer.spelled())


class Rendered(NamedTuple):
    """The text of a conversation, and where the model's answers are in it: [begin, end) in characters."""

    text: str
    answers: list[tuple[int, int]]


def rendered(messages: Sequence[Message], template: Template, special_words: Sequence[str]) -> list[Rendered]:
    """A conversation as text with its answers marked: each from where the template lets the model begin to where its
    turn ends. One text for all answers; where the template writes an earlier answer otherwise than the last (Qwen3
    leaves out what the model thought), one text for each.

    Raises ConfigError for a conversation that cannot be used: without an answer, with a special token spelled in a
    message, or one that the template does not take.
    """
    for message in messages:
        spelled = next((word for word in special_words if word and word in message["content"]), None)
        if spelled is not None:
            raise ConfigError(f"a message spells the special token {spelled}")
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n > 0]
    if not turns:
        raise ConfigError("no answer of the assistant follows a question")
    whole = template.text(messages, answer=False)
    parts = [_answer(messages, turn, template, special_words) for turn in turns]
    if all(whole.startswith(part.text) for part in parts):
        return [Rendered(whole, [part.answers[0] for part in parts])]
    return parts


def _answer(
    messages: Sequence[Message], turn: int, template: Template, special_words: Sequence[str]
) -> Rendered:
    """A conversation up to one answer, which alone is marked."""
    before = template.text(messages[:turn])
    text = template.text(messages[: turn + 1], answer=False)
    if not text.startswith(before):
        raise ConfigError("the chat template does not write an answer where it lets one begin")
    ended = text.rstrip()
    end = len(ended) if ended.endswith(tuple(filter(None, special_words))) else len(text)
    return Rendered(text, [(len(before), max(end, len(before)))])


def rendered_from(
    messages: Sequence[Message], begin: int, template: Template, special_words: Sequence[str]
) -> Rendered:
    """The text of a conversation in which the answers from message `begin` on are marked, of which there is one.

    Raises ConfigError as `rendered` does, and for several answers of which the template writes an earlier one otherwise
    than the last."""
    whole = rendered(messages, template, special_words)[-1]
    count = sum(message["role"] == "assistant" for message in messages[begin:])
    if len(whole.answers) < count:
        raise ConfigError("the chat template writes earlier answers otherwise, so only one may be compared")
    return whole._replace(answers=whole.answers[-count:])


def messages_of(values: Sequence[Any], names: Sequence[str]) -> list[Message]:
    """The messages that a row of a data set holds in the columns `names`: one column with a list of messages, or the
    question and its answer in two columns, or Alpaca's instruction, input and output.

    Raises ValueError with what is wrong.
    """
    if len(values) == 1:
        return [_message(message) for message in _as_list(values[0], names[0])]
    *questions, answer = values
    if isinstance(answer, list) or isinstance(questions[0], list):  # prompt and completion as messages
        return [_message(message) for value, name in zip(values, names) for message in _as_list(value, name)]
    texts = []
    for value, name in zip(values, names):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"the column {name} is {type(value).__name__}, not text")
        texts.append(value or "")
    question = "\n\n".join(filter(None, texts[:-1]))
    for part, column in ((question, names[0]), (texts[-1], names[-1])):
        if not part.strip():
            raise ValueError(f"the column {column} is empty")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": texts[-1]}]


def preference_of(
    values: Sequence[Any], names: Sequence[str]
) -> tuple[list[Message], list[Message], list[Message]]:
    """The messages that two conversations share, and what follows them in the chosen and in the rejected one, of a row
    of a data set with the columns `names`: the chosen and the rejected conversation, or before these a prompt, as text
    or messages, that texts, answers or whole conversations go on from.

    Raises ValueError with what is wrong.
    """
    if len(values) not in (2, 3):
        raise ValueError(
            f"{len(values)} columns are named, where chosen and rejected are two, or three with a prompt"
        )
    *prompts, chosen, rejected = values
    before: list[Message] = []
    if prompts and isinstance(prompts[0], list):
        before = [_message(turn) for turn in _as_list(prompts[0], names[0])]
    elif prompts:
        before = [{"role": "user", "content": _text(prompts[0], names[0])}]
    first, second = (_continue(before, value, name) for value, name in zip((chosen, rejected), names[-2:]))
    if first == second:
        raise ValueError(f"the columns {names[-2]} and {names[-1]} are the same")
    differs = (n for n, (turn, other) in enumerate(zip(first, second)) if turn != other)
    shared = next(differs, min(len(first), len(second)))
    if not shared:
        raise ValueError(f"the columns {names[-2]} and {names[-1]} share no beginning")
    for messages, name in ((first, names[-2]), (second, names[-1])):
        if not any(message["role"] == "assistant" for message in messages[shared:]):
            raise ValueError(f"the column {name} has no answer of the assistant after what both share")
    return first[:shared], first[shared:], second[shared:]


def _continue(before: list[Message], value: Any, name: str) -> list[Message]:
    """The conversation that begins with some messages, which a column may repeat."""
    if before and not isinstance(value, list):
        return [*before, {"role": "assistant", "content": _text(value, name)}]
    messages = [_message(message) for message in _as_list(value, name)]
    if before and messages[0]["role"] == "assistant":
        return [*before, *messages]
    if before and before[-1] not in messages:
        raise ValueError(f"the column {name} is a conversation without the prompt; name the others alone")
    return messages


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the column {name} is {type(value).__name__}, not text")
    if not value.strip():
        raise ValueError(f"the column {name} is empty")
    return value


def _as_list(value: Any, name: str) -> list[Any]:
    if isinstance(value, str):  # a list in a cell of a table
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"the column {name} holds no list of messages") from None
    if not isinstance(value, list) or not value:
        raise ValueError(f"the column {name} holds no list of messages")
    return value


def _message(turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        raise ValueError("a message is not a table with role and content")
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    if not isinstance(role, str) or not role:
        raise ValueError("a message has no role")
    if isinstance(content, list):  # parts, of which text is read
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        if len(parts) != len(content) or not all(isinstance(part, str) for part in parts):
            raise ValueError("a message has parts that are not text")
        content = "".join(filter(None, parts))
    if content is None and turn.get("tool_calls"):
        content = json.dumps(turn["tool_calls"], ensure_ascii=False)
    if not isinstance(content, str):
        raise ValueError(f"the {role}'s message has no content")
    return {"role": _ROLES.get(role.lower(), role.lower()), "content": content}


def within(offsets: Sequence[tuple[int, int]], answers: Sequence[tuple[int, int]]) -> Iterator[bool]:
    """Whether each token, from character to character, begins in an answer. Both lists are in order."""
    at = 0
    for begin, _ in offsets:
        while at < len(answers) and answers[at][1] <= begin:
            at += 1
        yield at < len(answers) and answers[at][0] <= begin
