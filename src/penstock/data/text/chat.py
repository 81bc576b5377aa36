"""Rendering of conversations by a model's chat template, and the places of the answers in the text."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.boundary.templates import check_template, render
from penstock.data.text.messages import MARKS, Message
from penstock.data.text.tokenizers import Tokenizer
from penstock.errors import ConfigError

_log = logging.getLogger(__name__)

PLAIN = """\
{% if tools %}{{ '<|tools|>\\n' + tools | tojson + eos_token + '\\n' }}{% endif %}
{% for message in messages %}
{{- '<|' + message['role'] + '|>\\n' }}
{%- if message['reasoning_content'] %}{{ '<think>\\n' + message['reasoning_content'] + '\\n</think>\\n\\n' }}{% endif %}
{{- message['content'] or '' }}
{%- for each in message['tool_calls'] or [] %}{% set call = each['function'] or each %}
{% set arguments = call['arguments'] if call['arguments'] is string else call['arguments'] | tojson %}
{{- '<tool_call>\\n{"name": ' + call['name'] | tojson + ', "arguments": ' + arguments + '}\\n</tool_call>' }}
{%- endfor %}
{{- eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""
"""The template for a model without one: each turn below its role, ended by the tokenizer's own end."""
DESCRIBING = ("name", "tool_call_id")
"""Fields that name the author of a message, or the call that it answers. Templates also use `name` for tools."""
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of the field that holds a model's reasoning; transformers passes the first two to templates."""


class Template:
    """A model's chat template, which turns messages into a text. It comes from outside, so it runs in a sandbox, in
    another process, with limits: see `penstock.boundary.templates`."""

    def __init__(self, text: str, specials: Mapping[str, str]) -> None:
        """`specials` are special tokens by their names in templates, such as `eos_token`. Raises ConfigError."""
        check_template(text)
        self.source, self._specials = text, dict(specials)
        self._reported: set[str] = set()

    def text(
        self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True, tools: list[Any] | None = None
    ) -> str:
        """Render messages; with `answer`, up to where the model's next answer begins. As in transformers, fields
        without a value are left out, and reasoning has all of its names. Raises ConfigError for refused messages."""
        named = [_with_all_names(message) for message in messages]
        values = {"messages": named, "tools": tools, "documents": None, "add_generation_prompt": answer}
        return render(self.source, {**values, **self._specials})

    def writes(
        self, name: str, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None
    ) -> bool:
        """Whether a field of messages, or the tools, make a difference to the template."""
        words = _THOUGHTS if name in _THOUGHTS else (name,)
        if name not in DESCRIBING and any(word in self.source for word in words):
            return True
        fewer = [{key: value for key, value in message.items() if key != name} for message in messages]
        try:
            full = self.text(messages, answer=False, tools=tools)
            return full != self.text(fewer, answer=False, tools=None if name == "tools" else tools)
        except ConfigError:
            return True

    def report(self, words: str) -> None:
        """Warn once."""
        if words not in self._reported:
            self._reported.add(words)
            _log.warning(words)

    def report_unwritten(self, names: Sequence[str]) -> None:
        """Warn once of fields that the template does not write."""
        if names:
            self.report(f"The chat template does not write {', '.join(names)}, so the model does not see it.")


def _with_all_names(message: Mapping[str, Any]) -> Message:
    """A message without empty fields, whose reasoning has every name that templates use."""
    given = {name: value for name, value in message.items() if value is not None}
    thought = next((given[name] for name in _THOUGHTS if name in given), None)
    return given if thought is None else {"thinking": thought, **given, "reasoning_content": thought}


def template_of(tokenizer: Tokenizer) -> Template | None:
    """A tokenizer's chat template, None if it has none. Raises ConfigError for one that cannot be used."""
    if tokenizer.chat_template is None:
        return None
    return Template(tokenizer.chat_template, tokenizer.spelled())


class Rendered(NamedTuple):
    """The text of a conversation, and where the model's answers are in it: [begin, end) in characters."""

    text: str
    answers: list[tuple[int, int]]


class ChatWriter:
    """Renders conversations by a template and marks their answers: each from where the template lets the model begin to
    the end of its turn. Fields of messages that the template leaves out are logged once."""

    def __init__(self, template: Template, special_words: Sequence[str]) -> None:
        """`special_words` are the special tokens as they are spelled, which no message may spell."""
        self._template = template
        self._specials = tuple(filter(None, special_words))
        self._special = re.compile("|".join(map(re.escape, self._specials)) or "(?!)")
        self._written: dict[str, bool] = {}
        """Whether the template writes a field of messages."""

    def write(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[Rendered]:
        """Render a conversation as one text with all answers. Where the template renders earlier answers differently
        from the last one (Qwen3 leaves out their reasoning), one text for each answer. Empty if no answer is learned.

        Raises ConfigError for a conversation that cannot be used: without an answer or with an empty one, with a
        special token spelled in a message, or one that the template does not take."""
        if spelled := next(filter(None, map(self._special.search, _texts([*messages, tools]))), None):
            raise ConfigError(f"a message spells the special token {spelled[0]}")
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n > 0]
        if not turns:
            raise ConfigError("no answer of the assistant follows a question")
        turns = [turn for turn in turns if _is_learned(messages[turn])]
        self._report_unwritten(messages, tools)
        parts = [self._answer(messages, turn, tools) for turn in turns]
        if not parts:
            return []
        whole = parts[-1].text
        if turns[-1] < len(messages) - 1:
            whole = self._template.text(messages, answer=False, tools=tools)
        if all(whole.startswith(part.text) for part in parts):
            return [Rendered(whole, [part.answers[0] for part in parts])]
        return parts

    def write_from(
        self, messages: Sequence[Message], begin: int, tools: list[Any] | None = None
    ) -> Rendered | None:
        """Render a conversation with the answers from message `begin` on marked; None if none of them is to be learned.

        Raises ConfigError as `write` does, and for several answers where the template renders an earlier one
        differently from the last."""
        parts = self.write(messages, tools)
        count = sum(message["role"] == "assistant" and _is_learned(message) for message in messages[begin:])
        if not count:
            return None
        if len(parts[-1].answers) < count:
            raise ConfigError(
                "the chat template writes earlier answers differently, so only one may be compared"
            )
        return parts[-1]._replace(answers=parts[-1].answers[-count:])

    def _answer(self, messages: Sequence[Message], turn: int, tools: list[Any] | None) -> Rendered:
        """Render a conversation up to one answer, and mark that answer alone."""
        message = messages[turn]
        contents = [message.get(name) for name in ("content", "tool_calls", *_THOUGHTS)]
        if not any(text.strip() for text in _texts(contents)):
            raise ConfigError("an answer of the assistant is empty")
        before = self._template.text(messages[:turn], tools=tools)
        text = self._template.text(messages[: turn + 1], answer=False, tools=tools)
        if not text.startswith(before):
            raise ConfigError(_misplaced(text, before, str(message.get("content", "")).strip()))
        ended = text.rstrip()
        end = len(ended) if ended.endswith(self._specials) else len(text)
        if end == len(text) and (
            message.get("tool_calls") or ended.endswith(str(message["content"]).rstrip())
        ):
            text += self._mark_behind(text, messages, turn, tools)
            end = len(text)
        return Rendered(text, [(len(before), max(end, len(before)))])

    def _mark_behind(self, text: str, messages: Sequence[Message], turn: int, tools: list[Any] | None) -> str:
        """The special token that begins the turn after an answer, for templates that end answers in no other way."""
        following = {"role": "tool" if messages[turn].get("tool_calls") else "user", "content": "?"}
        following = messages[turn + 1] if turn + 1 < len(messages) else following
        try:
            longer = self._template.text([*messages[: turn + 1], following], answer=False, tools=tools)
        except ConfigError:
            longer = text
        behind = longer[len(text) :] if longer.startswith(text) else ""
        mark = self._special.match(behind, len(behind) - len(behind.lstrip()))
        if mark is None:
            self._template.report(
                "The chat template ends answers with no special token, so the model does not learn to stop. Name one "
                "that does in data.template."
            )
            return ""
        return behind[: mark.end()]

    def _report_unwritten(self, messages: Sequence[Message], tools: list[Any] | None) -> None:
        """Log fields that the template leaves out. Raises ConfigError where one is a call of a tool."""
        fields = {name for message in messages for name in message} - {"role", "content", *MARKS}
        unwritten = []
        for name in sorted(fields | ({"tools"} if tools else set())):
            if name not in self._written:
                self._written[name] = self._template.writes(name, messages, tools)
                unwritten += [] if self._written[name] else [name]
            if name == "tool_calls" and not self._written[name]:
                raise ConfigError(
                    "the chat template does not write calls of tools (tool_calls), which an answer holds. Name one "
                    "that does in data.template"
                )
        self._template.report_unwritten(unwritten)
        if any(message.get(mark) for message in messages if message["role"] != "assistant" for mark in MARKS):
            self._template.report(
                f"Turns of other roles are marked to be learned ({', '.join(MARKS)}), but only the assistant's are."
            )


def _misplaced(text: str, before: str, content: str) -> str:
    """The reason why an answer does not begin at the end of `before`, where the template lets the model begin."""
    at = text.rfind(content)
    if not content or not before.startswith(text[:at]):
        return "the chat template does not write an answer where it lets one begin. Name another in data.template"
    return (
        f"the chat template lets an answer begin with {before[at:]!r}, and does not write that before this one. Begin "
        "the answer with the thought that belongs there, or name a template without it in data.template"
    )


def _is_learned(message: Message) -> bool:
    return all(message.get(mark, 1) for mark in MARKS)


def _texts(value: Any) -> Iterator[str]:
    """All texts inside a value, except names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def within(offsets: Sequence[tuple[int, int]], answers: Sequence[tuple[int, int]]) -> Iterator[bool]:
    """Whether each token, given by its characters, begins inside an answer. Both lists are sorted."""
    at = 0
    for begin, _ in offsets:
        while at < len(answers) and answers[at][1] <= begin:
            at += 1
        yield at < len(answers) and answers[at][0] <= begin
