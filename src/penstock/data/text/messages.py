"""Conversions from the forms in which data sets store conversations to the messages that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]
"""One turn: `role`, `content`, and whatever else its template may write, such as `tool_calls`."""
BESIDE = {
    "system": "system", "system_prompt": "system", "tools": "tools", "history": "history", "label": "label",
    "kto_tag": "label",
}  # fmt: skip
"""Columns that are read in addition to the messages, and their content."""
MARKS = ("weight", "train", "training", "loss_mask", "loss")
"""Fields of a message that say whether it is learned."""
_ROLES = dict.fromkeys(("gpt", "bot", "model", "chatgpt"), "assistant") | {
    "human": "user",
    "function": "tool",
}
_SHAREGPT = _ROLES | dict.fromkeys(("observation", "tool_response", "ipython"), "tool")


class Conversation(NamedTuple):
    """A row of a data set: its messages, or the messages that two conversations share and the continuation of each; and
    the tools for its template."""

    parts: tuple[list[Message], ...]
    tools: list[Any] | None = None


def conversation_of(
    values: Sequence[Any], names: Sequence[str], beside: Mapping[str, Any], *, compared: bool = False
) -> Conversation:
    """The conversation in the columns `names` of a row, or the two that are `compared`; `beside` holds the values of
    other columns by the kinds of `BESIDE`. Raises ValueError with the fault."""
    if str(beside.get("label", True)).strip().lower() in ("false", "0"):
        raise ValueError(
            "its label is false: unpaired preferences (KTO) are not supported, and it is not learned as a good answer. "
            "Remove such rows, pair them for the task preferences, or name the columns without the label in "
            "data.columns"
        )
    parts = (_compared if compared else _messages)(values, names)
    return Conversation((_opened(parts[0], beside), *parts[1:]), _tools(beside.get("tools")))


def _messages(values: Sequence[Any], names: Sequence[str]) -> tuple[list[Message]]:
    """A list of messages in one column, question and answer in two, or Alpaca's instruction, input and output."""
    if len(values) == 1:
        return ([_message(message) for message in _as_list(values[0], names[0])],)
    if any(isinstance(value, list | Mapping) for value in (values[0], values[-1])):  # prompt and completion
        return ([_message(turn) for value, name in zip(values, names) for turn in _as_list(value, name)],)
    return ([_question(values[:-1], names), {"role": "assistant", "content": _text(values[-1], names[-1])}],)


def _question(values: Sequence[Any], names: Sequence[str]) -> Message:
    """A question in one column, or an instruction and its input."""
    texts = ["" if value is None else value for value in values]
    for text, name in zip(texts, names):
        if not isinstance(text, str):
            raise ValueError(f"the column {name} is {type(text).__name__}, not text")
    return {"role": "user", "content": _text("\n\n".join(filter(None, texts)), names[0])}


def _compared(
    values: Sequence[Any], names: Sequence[str]
) -> tuple[list[Message], list[Message], list[Message]]:
    """The chosen and the rejected conversation: texts, messages or whole conversations, with a prompt or without."""
    if len(values) < 2:
        raise ValueError(
            f"{len(values)} columns are named, where chosen and rejected are two, or three with a prompt"
        )
    *prompts, chosen, rejected = values
    before: list[Message] = []
    if prompts and isinstance(prompts[0], list):
        before = [_message(turn) for turn in _as_list(prompts[0], names[0])]
    elif prompts:
        before = [_question(prompts, names)]
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
    if before and not isinstance(value, list | Mapping):
        return [*before, {"role": "assistant", "content": _text(value, name)}]
    messages = [_message(message) for message in _as_list(value, name)]
    if before and messages[0]["role"] == "assistant":
        return [*before, *messages]
    if before and before[-1] not in messages:
        raise ValueError(f"the column {name} is a conversation without the prompt; name only the other two")
    return messages


def _opened(messages: list[Message], beside: Mapping[str, Any]) -> list[Message]:
    """The messages, after the system message and earlier turns from their own columns."""
    opening, rest = (messages[:1], messages[1:]) if messages[0]["role"] == "system" else ([], messages)
    system = beside.get("system", "")
    if not isinstance(system, str):
        raise ValueError(f"the column system is {type(system).__name__}, not text")
    if system and opening and opening[0]["content"] != system:
        raise ValueError("it has a system message, and another one in the column system")
    opening = [{"role": "system", "content": system}] if system else opening
    return [*opening, *_history(beside.get("history")), *rest]


def _history(value: Any) -> Iterator[Message]:
    """Earlier turns: messages, or pairs of a question and its answer."""
    for turn in _as_list(value, "history") if value else ():
        if isinstance(turn, Mapping):
            yield _message(turn)
        elif (
            isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn)
        ):
            yield {"role": "user", "content": turn[0]}
            yield {"role": "assistant", "content": turn[1]}
        else:
            raise ValueError(
                "the column history holds no messages, and no pairs of a question and its answer"
            )


def _tools(value: Any) -> list[Any] | None:
    if value is None or value == "":
        return None
    tools = _parsed(value, "the column tools")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("the column tools holds no list of tools, each a table")
    return tools


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str | None):
        raise ValueError(f"the column {name} is {type(value).__name__}, not text")
    if value is None or not value.strip():
        raise ValueError(f"the column {name} is empty")
    return value


def _as_list(value: Any, name: str) -> list[Any]:
    turns = _parsed(value, f"the column {name}", "list of messages")
    turns = [turns] if isinstance(turns, Mapping) else turns
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"the column {name} holds no list of messages")
    return turns


def _parsed(value: Any, subject: str, what: str = "JSON") -> Any:
    """A value, parsed where a table's cell or a ShareGPT message holds it as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError(f"{subject} holds no {what}") from None


def _message(turn: Any) -> Message:
    """A message with its fields under the names that chat templates use, without fields that have no value."""
    if not isinstance(turn, Mapping):
        raise ValueError("a message is not a table with role and content")
    message = {name: value for name, value in turn.items() if value is not None}
    roles = _ROLES if "role" in message else _SHAREGPT
    for name, other in (("role", "from"), ("content", "value")):
        if name not in message and other in message:
            message[name] = message.pop(other)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError("a message has no role")
    if role.lower() == "function_call":
        message |= {"role": "assistant", "content": "", "tool_calls": _calls(message.get("content"))}
        return message
    message["role"] = role = roles.get(role.lower(), role.lower())
    if "function_call" in message:  # OpenAI's older form
        message["tool_calls"] = _calls(message.pop("function_call"))
    for name in MARKS:
        if message.get(name, 0) not in (0, 1):
            raise ValueError(
                f"the {role}'s message has {name} {message[name]!r}; only 0 and 1, or false and true, are used"
            )
    content = message.get("content")
    if isinstance(content, list):  # parts; only text is read
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        if len(parts) != len(content) or not all(isinstance(part, str) for part in parts):
            raise ValueError("a message has parts that are not text")
        message["content"] = content = "".join(filter(None, parts))
    if content is None and not message.get("tool_calls"):
        raise ValueError(f"the {role}'s message has no content")
    if not isinstance(content, str | None):
        raise ValueError(f"the content of the {role}'s message is {type(content).__name__}, not text")
    return message


def _calls(value: Any) -> list[Message]:
    """Calls of tools in today's form, converted from older forms: one call or a list, as JSON text or as values."""
    calls = _parsed(value, "a function_call")
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list) or not all(
        isinstance(call, Mapping) and call.get("name") for call in calls
    ):
        raise ValueError("a function_call holds no name of a function and its arguments")
    return [{"type": "function", "function": dict(call)} for call in calls]


def without_nulls(value: Any) -> Any:
    """A value without the nulls inside it: a table of Arrow has every field of a column in every row."""
    if isinstance(value, Mapping):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value
