"""Requests in OpenAI's form: bodies are checked, and turned into prompts and settings.

Unknown keys are refused, so that no setting is silently ignored. Keys that only describe the caller are not used.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from penstock.boundary.files import quoted
from penstock.boundary.trees import Bounds, parse_json
from penstock.config.convert import BadValue, Range, convert, nearest
from penstock.config.decoding import Decoding
from penstock.config.load import from_dict
from penstock.data.text.chat import DESCRIBING, Template
from penstock.errors import ConfigError
from penstock.infer.usual import chosen

MOST_CHOICES = 16
"""Maximum number of texts for one prompt."""
MOST_LIKELIEST = 20
"""Maximum number of alternatives at each place."""
MOST_BIASES = 300
"""Maximum number of entries of `logit_bias`, as with OpenAI."""
SEEDS = 1 << 31
"""Seeds are used modulo this number, because clients send any integer of 64 bits."""
MOST_PROMPTS = 256
"""Maximum number of prompts, or texts to embed or translate, in one request."""
DECODING = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "seed",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty", "min_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty", "no_repeat_ngram": "no_repeat_ngram", "ignore_eos": "ignore_end",
}  # fmt: skip
"""Keys of a request, and their names in `Decoding`."""
_CALLER = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key"})
_SHARED = _CALLER | {
    "model", "max_tokens", "n", "stop", "stream", "stream_options", "logit_bias", "label", *DECODING,
}  # fmt: skip
_KEYS = {
    "completions": _SHARED | {"prompt", "return_token_ids", "logprobs", "echo", "best_of"},
    "chat": _SHARED | {"messages", "max_completion_tokens", "logprobs", "top_logprobs"},
    "translate": frozenset({"model", "text", "max_tokens", "label", *DECODING, *_CALLER}),
    "embeddings": frozenset({"model", "input", "encoding_format", *_CALLER}),
    "classify": frozenset({"model", "input", *_CALLER}),
}


_IDLE: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "service_tier": ("auto", "default"), "suffix": ("",), "web_search_options": (), "audio": (), "prediction": (),
    "reasoning_effort": (), "verbosity": (),
}  # fmt: skip
"""Unsupported settings of OpenAI, and the values with which they have no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A checked request for texts."""

    prompts: tuple[str | tuple[int, ...], ...]
    decoding: dict[str, Any]
    """Fields of `Decoding` except `stop`; `max_tokens` only if the request sets it."""
    max_tokens: int | None = None
    """Maximum number of new tokens; None: the usual number."""
    choices: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    label: str | tuple[str, ...] | None = None
    """Label that chooses experts, one for all prompts or one for each."""
    usage: bool = False
    """Whether a stream ends with the number of tokens."""
    marked: bool = False
    """Whether prompts spell special tokens, as chat templates do."""
    logprobs: int | None = None
    """Alternatives at each place to return with each token's log-probability; None: no log-probabilities."""
    echo: bool = False
    """Whether a text begins with its prompt."""
    best_of: int = 1
    """Number of texts to generate, of which the `choices` likeliest are returned."""
    token_ids: bool = False
    """Whether a stream sends every token's number at once, even if it does not complete a character."""

    @property
    def scored(self) -> bool:
        """Whether texts are scored after generation."""
        return self.logprobs is not None or self.best_of > self.choices


def body_of(raw: bytes, route: str, *, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a body of at most `max_bytes`. Raises ConfigError for anything else, and for unknown keys."""
    body = parse_json(
        raw, "The body of the request", bounds=Bounds(bytes=max_bytes, values=200_000, control=True)
    )
    allowed = _KEYS[route]
    body = {
        key: value for key, value in body.items() if value is not None and value not in _IDLE.get(key, ())
    }
    for key in body:
        if key in _IDLE:
            raise ConfigError(f"{key} is not supported; leave it out.")
        if key not in allowed:
            raise ConfigError(f"{quoted(key)} is not a setting of this route.{nearest(key, sorted(allowed))}")
    if isinstance(bias := body.get("logit_bias"), dict) and len(bias) > MOST_BIASES:
        raise ConfigError(f"logit_bias has {len(bias):,} entries, but at most {MOST_BIASES} are allowed.")
    return body


def completion(body: Mapping[str, Any], usual: Mapping[str, Any]) -> TextRequest:
    """A request for /v1/completions; `usual` are the settings of the model's folder. Raises ConfigError for a missing
    or bad prompt."""
    request = _request(body, texts_of(body, "prompt"), {"temperature": 1.0, **usual})
    return _scored(replace(
        request,
        logprobs=_field(body, "logprobs", Annotated[int, Range(0, MOST_LIKELIEST)], None),
        echo=_field(body, "echo", bool, False),
        best_of=_field(body, "best_of", Annotated[int, Range(1, MOST_CHOICES)], request.choices),
    ))  # fmt: skip


def chat(body: Mapping[str, Any], template: Template | None, usual: Mapping[str, Any]) -> TextRequest:
    """A request for /v1/chat/completions. Raises ConfigError without messages, or if the model has no template."""
    if template is None:
        raise ConfigError("The model's folder has no chat template, so it cannot chat. Use /v1/completions.")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError("messages must be a list of tables with role and content.")
    messages = [_message(message) for message in messages]
    text = template.text(messages)
    for name in sorted({name for message in messages for name in message} - {"role", "content"}):
        if not template.writes(name, messages):
            if name not in DESCRIBING:
                raise ConfigError(
                    f"The model's chat template does not use {quoted(name)} of a message; leave it out."
                )
            template.report_unwritten([name])
    fields = dict(body)
    if "max_completion_tokens" in fields:
        fields["max_tokens"] = fields.pop("max_completion_tokens")
    request = replace(_request(fields, [text], {"temperature": 1.0, **usual}), marked=True)
    top = _field(body, "top_logprobs", Annotated[int, Range(0, MOST_LIKELIEST)], None)
    if not _field(body, "logprobs", bool, False):
        if top is not None:
            raise ConfigError("top_logprobs is for logprobs=true; give both or neither.")
        return request
    return _scored(replace(request, logprobs=top or 0))


def _message(message: Any) -> dict[str, Any]:
    """A message for the template, without null fields, which OpenAI's clients send when they return an answer."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ConfigError("A message must be a table with role and content, and its role text.")
    answers = message["role"] == "assistant"
    content = "" if answers and message.get("content") is None else _content(message.get("content"))
    fields: dict[str, Any] = {"role": message["role"], "content": content}
    for name, value in message.items():
        # lm-evaluation-harness marks each message as text.
        if name in fields or value is None or value == [] or (name, value) == ("type", "text"):
            continue
        fields[name] = (
            [_call(call) for call in value] if name == "tool_calls" and isinstance(value, list) else value
        )
    return fields


def _call(call: Any) -> Any:
    """A tool call for the template: its arguments, which OpenAI's clients send as JSON text, become a table."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = parse_json(function["arguments"], "The arguments of a call")
    return {**call, "function": {**function, "arguments": arguments}}


def _content(content: Any) -> str:
    """The text of a message, from a string or a list of parts. Raises ConfigError for anything else, such as images."""
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        parts = [{key: value for key, value in part.items() if value not in (None, [])} for part in content]
        texts = [part["text"] for part in parts if part.keys() == {"type", "text"} and part["type"] == "text"]
        whole = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        content = "".join(texts) if whole else None
    if not isinstance(content, str):
        raise ConfigError(
            'The content of a message must be text, or a list of parts such as {"type": "text", "text": "Hi"}.'
        )
    return content


def _scored(request: TextRequest) -> TextRequest:
    """Check a request and return it. Raises ConfigError for settings that contradict each other."""
    if request.best_of < request.choices:
        raise ConfigError(f"best_of is {request.best_of}, but must be at least n={request.choices}.")
    unstreamable = {
        "logprobs": request.logprobs is not None,
        "echo": request.echo,
        "best_of": request.best_of > request.choices,
    }
    if request.stream and any(unstreamable.values()):
        named = " and ".join(name for name, requested in unstreamable.items() if requested)
        raise ConfigError(f"{named} cannot be streamed; leave stream out.")
    return request


def in_base64(body: Mapping[str, Any]) -> bool:
    """Whether a request wants vectors in base64, which OpenAI's clients request by default. Raises ConfigError for a
    form other than that and `float`."""
    return bool(_field(body, "encoding_format", Literal["float", "base64"], "float") == "base64")


def translation(body: Mapping[str, Any], usual: Mapping[str, Any]) -> TextRequest:
    """A request for /v1/translate: `text`, one or a list."""
    return _request(body, texts_of(body, "text"), {"temperature": 0.0, **usual})


def texts_of(body: Mapping[str, Any], key: str) -> list[str | tuple[int, ...]]:
    """One or several texts, each a string or token numbers. Raises ConfigError for anything else, and for too many."""
    value = body.get(key)
    items = [value] if isinstance(value, str) or _numbers(value) else value
    if not isinstance(items, list) or not items or not all(isinstance(i, str) or _numbers(i) for i in items):
        raise ConfigError(f"{key} must be a text, token numbers, or a list of either.")
    if len(items) > MOST_PROMPTS:
        raise ConfigError(
            f"{key} has {len(items):,} texts, but at most {MOST_PROMPTS} are allowed; send several requests."
        )
    return [item if isinstance(item, str) else tuple(item) for item in items]


def images_of(body: Mapping[str, Any]) -> list[str]:
    """One or several images in base64, plain or as data URLs. Raises ConfigError for anything else and too many."""
    images = [
        item.partition(",")[2] if isinstance(item, str) and item.startswith("data:") else item
        for item in texts_of(body, "input")
    ]
    for image in images:
        try:
            base64.b64decode(image if isinstance(image, str) else "?", validate=True)
        except ValueError:
            raise ConfigError(
                "This model reads images: input must be an image in base64, such as data:image/jpeg;base64,…, or a "
                "list of them; or send a file as the body (curl --data-binary @photo.jpg)."
            ) from None
    return [str(image) for image in images]


def _numbers(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(number) is int and 0 <= number < 1 << 31 for number in value)
    )


def _request(
    body: Mapping[str, Any], prompts: Sequence[str | tuple[int, ...]], usual: Mapping[str, Any]
) -> TextRequest:
    decoding: dict[str, Any] = {option: body[key] for key, option in DECODING.items() if key in body}
    if bias := _field(body, "logit_bias", dict, {}):
        decoding["bias"] = [f"{key}={_decimal(amount)}" for key, amount in bias.items()]
    if type(seed := decoding.get("seed")) is int:
        decoding["seed"] = seed % SEEDS
    stop = body.get("stop", usual.get("stop", []))
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > 16 or not all(isinstance(s, str) and s for s in stop):
        raise ConfigError("stop must be a text, or a list of at most 16 texts.")
    label = body.get("label")
    if isinstance(label, list) and all(isinstance(part, str) for part in label):
        label = tuple(label)
    elif not isinstance(label, str | None):
        raise ConfigError("label must be a text, or a list with one for each prompt.")
    from_dict(Decoding, decoding, origin="the request")  # refuses wrong settings at once
    max_tokens = _field(
        body, "max_tokens", Annotated[int, Range(0 if body.get("echo") is True else 1, 1 << 24)], None
    )
    decoding = chosen(usual, decoding | ({"max_tokens": max_tokens} if max_tokens else {}))[0]
    decoding.pop("stop", None)
    options = {key: value for key, value in _field(body, "stream_options", dict, {}).items() if value}
    if more := {*options} - {"include_usage"}:
        raise ConfigError(f"stream_options.{quoted(min(more))} is not supported; leave it out.")
    if options and not body.get("stream"):
        raise ConfigError("stream_options are for stream=true; give both or neither.")
    choices = _field(body, "n", Annotated[int, Range(1, MOST_CHOICES)], 1)
    return TextRequest(
        prompts=tuple(prompts), decoding=decoding, max_tokens=max_tokens, choices=choices, best_of=choices,
        stop=tuple(stop), label=label, stream=_field(body, "stream", bool, False),
        usage=options.get("include_usage") is True, token_ids=_field(body, "return_token_ids", bool, False),
    )  # fmt: skip


def _decimal(amount: Any) -> str:
    return f"{amount:.9f}".rstrip("0").rstrip(".") if isinstance(amount, int | float) else quoted(amount)


def _field(body: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    if name not in body:
        return default
    if kind is dict:
        if not isinstance(body[name], dict):
            raise ConfigError(f"{name} must be a table.")
        return body[name]
    try:
        return convert(body[name], kind)
    except BadValue as problem:
        raise ConfigError(problem.sentence(name)) from None
