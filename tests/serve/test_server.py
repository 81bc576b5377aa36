"""The server from outside: over HTTP, with an engine that only counts; and once with real models."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import json
import os
import random
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import generation, small_folders
from helpers.fake_engine import CONTEXT, END, POISON, VOCABULARY
from helpers.modules import loaded
from helpers.served import Running, served
from helpers.sweeps import sweep
from penstock.config.decoding import Decoding
from penstock.config.load import to_dict
from penstock.data.text.chat import Template, template_of
from penstock.data.text.open import in_folder
from penstock.data.text.tokenizers import Bytes
from penstock.errors import ConfigError
from penstock.serve import parse
from penstock.serve.backend import Backend
from penstock.serve.serve import usual_name
from penstock.serve.settings import ServeConfig
from penstock.serve.worker import Opened, Worker, limits_of

pytest.importorskip("uvicorn")
pytestmark = pytest.mark.timeout(120)
TEMPLATE = "{% for one in messages %}{{ one.role[0] }}:{{ one.content }}\n{% endfor %}a:"
REAL = "penstock.serve.worker:opened"


def folder(where: Path, milliseconds: int) -> Path:
    """What stands for a model: a tokenizer of bytes, and a chat template."""
    pytest.importorskip("tokenizers")
    made = where / f"fake-{milliseconds}"
    made.mkdir()
    Bytes().save(made)
    file = made / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return made


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    where = folder(tmp_path_factory.mktemp("quick"), 1)
    settings = ["slots=4", "waiting=8", "body_seconds=1", "body_bytes=20000", "key=secret", "seconds=20"]
    with served(where, *settings) as running:
        yield running


def test_a_model_is_called_as_its_user_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "chat" / "export").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "runs" / "chat")
    for model in ("export", ".", f"{tmp_path}/runs/chat", f"{tmp_path}/runs/chat/export/"):
        assert usual_name(model) == "chat"
    assert usual_name(str(tmp_path / "runs")) == "runs"
    assert usual_name("Qwen/Qwen2.5-0.5B@main") == "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize(
    "given", [TEMPLATE, [{"name": "rag", "template": "x"}, {"name": "default", "template": TEMPLATE}]]
)
def test_of_several_chat_templates_the_default_is_taken(given: Any, tmp_path: Path) -> None:
    Bytes().save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": given}))
    template = template_of(in_folder(tmp_path))
    assert template is not None
    assert template.text([{"role": "user", "content": "How high?"}]) == "u:How high?\na:"


def test_a_template_may_use_what_transformers_lets_it() -> None:
    text = """{{ strftime_now("%Y") }}{% for one in messages %}{% if loop.index == 2 %}{% break %}{% endif %}
{%- generation -%}{{ one.content }}{%- endgeneration -%}
{% endfor %}"""
    said = Template(text, {}).text([{"content": "high"}, {"content": "low"}])
    assert said == time.strftime("%Y") + "high"


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_a_text_is_continued(quick: Running) -> None:
    status, answer, _ = quick.ask("/v1/completions", {"prompt": "a", "max_tokens": 3, "temperature": 0})
    assert status == 200
    assert answer["choices"] == [
        {"index": 0, "text": "bcd", "token_ids": [98, 99, 100], "finish_reason": "length", "logprobs": None}
    ]
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    many = quick.ask("/v1/completions", {"prompt": ["a", [10, 20]], "n": 2, "max_tokens": 2})[1]["choices"]
    assert [one["token_ids"] for one in many] == [[98, 99], [98, 99], [21, 22], [21, 22]]


def test_log_probabilities_are_told_as_evaluation_harnesses_ask_for_them(quick: Running) -> None:
    """The request by which lm-evaluation-harness scores a continuation: token numbers, echoed, with one token more."""
    body = {
        "prompt": [97, 98, 99], "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1, "seed": 1234
    }  # fmt: skip
    (choice,) = quick.ask("/v1/completions", body)[1]["choices"]
    assert (choice["text"], choice["token_ids"]) == ("abcd", [97, 98, 99, 100])
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "d"],
        "token_logprobs": [None, -0.98, -0.99, -1.0],
        "top_logprobs": [None, *[{"a": -0.97}] * 3],
        "text_offset": [0, 1, 2, 3],
    }
    (alone,) = quick.ask("/v1/completions", body | {"echo": False, "logprobs": 0})[1]["choices"]
    assert alone["text"] == "d"
    assert alone["logprobs"] == {
        "tokens": ["d"], "token_logprobs": [-1.0], "top_logprobs": [{}], "text_offset": [3]
    }  # fmt: skip
    (nothing,) = quick.ask("/v1/completions", body | {"max_tokens": 0})[1]["choices"]
    assert (nothing["text"], nothing["logprobs"]["token_logprobs"]) == ("abc", [None, -0.98, -0.99])
    messages = [{"role": "user", "content": "a"}]
    chat = {"messages": messages, "logprobs": True, "top_logprobs": 2, "max_tokens": 1}
    (said,) = quick.ask("/v1/chat/completions", chat)[1]["choices"]
    assert [one["token"] for one in said["logprobs"]["content"]] == [";"]
    assert [one["token"] for one in said["logprobs"]["content"][0]["top_logprobs"]] == ["a", "b"]


def test_an_evaluation_harness_reads_the_scores_of_its_batches(quick: Running) -> None:
    """lm-evaluation-harness's `local-completions` sends several texts as token numbers, sorts choices by their place,
    and adds up what follows the context, without the token that was made."""
    shared = {"model": "fake-1", "temperature": 0, "seed": 1234}
    body = {"prompt": [[97, 98, 99], [110, 111]], "max_tokens": 1, "logprobs": 1, "echo": True}
    choices = sorted(quick.ask("/v1/completions", shared | body)[1]["choices"], key=lambda one: one["index"])
    logs = [one["logprobs"]["token_logprobs"][1:-1] for one in choices]
    assert logs == [[-0.98, -0.99], [-1.11]]
    tops = [one["logprobs"]["top_logprobs"][1:-1] for one in choices]
    assert [[max(top.values()) for top in row] for row in tops] == [[-0.97, -0.97], [-0.97]]
    body = {"prompt": ["ab", [110]], "max_tokens": 5, "stop": ["e", "\n"]}
    made = quick.ask("/v1/completions", shared | body)[1]["choices"]
    assert [one["text"] for one in made] == ["cd", "opqrs"]


def test_the_token_that_ends_a_text_has_its_log_probability(quick: Running) -> None:
    """Harnesses leave out the last entry, which is that of the token that was made: without it, a real one."""
    body = {"prompt": [97, END - 1], "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    (choice,) = quick.ask("/v1/completions", body)[1]["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([97, END - 1], "stop")
    logs = choice["logprobs"]
    assert logs["token_logprobs"] == [None, -2.52, -2.53]
    assert [*map(len, logs.values())] == [3, 3, 3, 3]
    (alone,) = quick.ask("/v1/completions", body | {"echo": False})[1]["choices"]
    assert alone["logprobs"]["token_logprobs"] == [-2.53]


def test_tokens_are_shown_by_their_own_bytes_and_offsets_count_in_the_text(quick: Running) -> None:
    body = {"prompt": "a€z", "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
    (choice,) = quick.ask("/v1/completions", body)[1]["choices"]
    logs = choice["logprobs"]
    assert choice["text"] == "a€z{"
    assert logs["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "z", "{"]
    assert logs["text_offset"] == [0, 1, 1, 1, 2, 3]
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "max_tokens": 1}
    (entry,) = quick.ask("/v1/chat/completions", chat)[1]["choices"][0]["logprobs"]["content"]
    assert entry["bytes"] == list(entry["token"].encode())


def test_of_several_texts_the_likeliest_are_told(quick: Running) -> None:
    body = {"prompt": ["a", "k"], "max_tokens": 2, "n": 1, "best_of": 3}
    choices = quick.ask("/v1/completions", body)[1]["choices"]
    assert [one["text"] for one in choices] == ["bc", "lm"]
    for wrong, problem in (
        (body | {"n": 4}, "best_of is 3, but must be at least n=4"),
        (body | {"stream": True}, "best_of cannot be streamed"),
        ({"prompt": "a", "logprobs": 1, "stream": True}, "logprobs cannot be streamed"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ):
        status, answer, _ = quick.ask("/v1/completions", wrong)
        assert status == 400
        assert problem in answer["error"]["message"]


def test_a_stop_text_ends_it_and_is_left_out(quick: Running) -> None:
    body = {"prompt": "a", "max_tokens": 400, "stop": ["fg", "zz"]}
    choice = quick.ask("/v1/completions", body)[1]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("bcde", "stop")
    quick.until("open_requests", 0)


def test_a_stream_has_the_same_text_piece_by_piece(quick: Running) -> None:
    body = {"prompt": "a", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    lines = [line[6:] for line in quick.ask("/v1/completions", body)[1].splitlines() if line]
    assert lines[-1] == "[DONE]"
    parts = [json.loads(line) for line in lines[:-1]]
    assert "".join(part["choices"][0]["text"] for part in parts[:-1]) == "bcdef"
    assert parts[-2]["choices"][0]["finish_reason"] == "length"
    assert parts[-1]["usage"]["completion_tokens"] == 5
    # Every token comes by its number where that is requested.
    body = {"prompt": "a", "max_tokens": 5, "stream": True, "return_token_ids": True, "stop": ["ef"]}
    lines = [line[6:] for line in quick.ask("/v1/completions", body)[1].splitlines() if line]
    parts = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert [part["token_ids"] for part in parts[:-1]] == [[98], [99], [100], [101], [102]][: len(parts) - 1]
    assert "".join(part["text"] for part in parts) == "bcd"


def test_messages_go_through_the_models_template(quick: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 2}
    answer = quick.ask("/v1/chat/completions", body)[1]
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": ";<"}
    assert answer["usage"]["prompt_tokens"] == len("u:hi\na:")
    parts = [{"type": "text", "text": letter} for letter in "hi"]
    for message in ({"role": "user", "content": parts}, {"role": "user", "content": "hi", "type": "text"}):
        again = quick.ask("/v1/chat/completions", {**body, "messages": [message]})[1]
        assert again["choices"] == answer["choices"]
    text = quick.ask("/v1/chat/completions", body | {"stream": True})[1]
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in text.split("\n\n")[:-2]]
    assert deltas[0] == {"role": "assistant"}
    assert "".join(delta.get("content", "") for delta in deltas) == ";<"


def test_more_prompts_than_may_wait_run_in_turn(quick: Running) -> None:
    body = {"prompt": ["a", "k"] * 20, "max_tokens": 2, "temperature": 0}
    status, answer, _ = quick.ask("/v1/completions", body)
    assert status == 200, answer
    assert [one["text"] for one in answer["choices"]] == ["bc", "lm"] * 20
    status, answer, _ = quick.ask("/v1/completions", body | {"prompt": ["a"] * 257})
    assert status == 400
    assert "at most 256" in answer["error"]["message"]
    quick.until("open_requests", 0)


def test_what_asks_for_nothing_is_taken(quick: Running) -> None:
    """As clients send it that fill in every field."""
    plain = quick.ask("/v1/chat/completions", CHAT | {"max_tokens": 2})[1]["choices"]
    idle = {
        "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"},
        "functions": None, "stop": None, "logit_bias": {}, "modalities": ["text"], "audio": None,
    }  # fmt: skip
    status, answer, _ = quick.ask("/v1/chat/completions", CHAT | {"max_tokens": 2} | idle)
    assert status == 200, answer
    assert answer["choices"] == plain
    said = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "annotations": []}
    messages = [*CHAT["messages"], said, {"role": "user", "content": "hi", "audio": None}]
    assert quick.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 2})[1]["choices"] == plain


def test_a_page_of_a_named_origin_may_call(tmp_path: Path) -> None:
    with served(folder(tmp_path, 1), "cors=https://example.org", "key=secret") as running:
        for origin, allowed in (("https://example.org", True), ("https://example.com", False)):
            answer = running.preflight("/v1/completions", origin)
            assert (answer.get("access-control-allow-origin") == origin) == allowed
        headers = running.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})[2]
        assert "access-control-allow-origin" not in headers


@pytest.fixture
def client(quick: Running) -> Iterator[Any]:
    """OpenAI's own."""
    from openai import OpenAI

    with OpenAI(base_url=f"http://127.0.0.1:{quick.port}/v1", api_key="secret", max_retries=0) as opened:
        yield opened


def test_openais_own_client_completes_texts_and_chats(client: Any) -> None:
    from openai import AuthenticationError, BadRequestError, NotFoundError

    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model
    with pytest.raises(NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")
    common = {"model": model.id, "temperature": 0}
    drawn = client.completions.create(
        prompt="a", max_tokens=3, n=2, logprobs=1, echo=True, seed=2**63 - 1, **common
    )
    assert [one.text for one in drawn.choices] == ["abcd"] * 2
    assert drawn.choices[0].logprobs.token_logprobs == [None, -0.98, -0.99, -1.0]
    assert (drawn.usage.prompt_tokens, drawn.usage.completion_tokens) == (1, 6)
    stopped = client.completions.create(prompt="a", max_tokens=9, stop=["d"], **common).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("bc", "stop")
    with client.completions.create(prompt="a", max_tokens=3, stream=True, **common) as pieces:
        assert "".join(piece.choices[0].text for piece in pieces) == "bcd"
    chat = {"messages": [{"role": "user", "content": "How high?"}], "max_tokens": 2, **common}
    said = client.chat.completions.create(**chat).choices[0].message
    assert said.content == ";<"
    messages = [*chat["messages"], said.model_dump(), chat["messages"][0]]  # type: ignore[misc]
    assert client.chat.completions.create(**chat | {"messages": messages}).usage.prompt_tokens == 31
    with client.chat.completions.create(stream=True, **chat) as deltas:
        assert "".join(delta.choices[0].delta.content or "" for delta in deltas) == ";<"
    with pytest.raises(BadRequestError, match="temperature"):
        client.completions.create(model=model.id, prompt="a", temperature=1e9)
    with pytest.raises(AuthenticationError):
        client.with_options(api_key="other").models.list()


def test_vectors_come_in_base64_where_a_client_asks_for_it(tmp_path: Path) -> None:
    """As OpenAI's own client does, unless it is told otherwise."""
    from openai import OpenAI

    with served(folder(tmp_path, 1), opener="helpers.fake_engine:encoder_opened") as running:
        body = {"input": ["a", "hello"], "model": "fake-1"}
        plain = [one["embedding"] for one in running.ask("/v1/embeddings", body)[1]["data"]]
        assert plain[1][0] == plain[0][0] + 4
        packed = running.ask("/v1/embeddings", body | {"encoding_format": "base64"})[1]["data"]
        assert [[*struct.unpack("<2f", base64.b64decode(one["embedding"]))] for one in packed] == plain
        with OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none") as client:
            assert [one.embedding for one in client.embeddings.create(**body).data] == plain
        status, answer, _ = running.ask("/v1/embeddings", body | {"encoding_format": "hex"})
        assert status == 400
        assert "encoding_format is 'hex', but must be" in answer["error"]["message"]


def test_what_a_template_does_not_write_of_a_message_is_told(caplog: pytest.LogCaptureFixture) -> None:
    body = {"messages": [{"role": "user", "content": "hi", "name": "ann"}]}
    template = Template("{% for t in tools or [] %}{{ t.name }}{% endfor %}" + TEMPLATE, {})
    assert [parse.chat(body, template, {}).prompts for _ in range(2)] == [("u:hi\na:",)] * 2
    (record,) = caplog.records
    assert record.getMessage() == "The chat template does not write name, so the model does not see it."
    assert parse.chat(body, Template("{{ messages[0].name }}", {}), {}).prompts == ("ann",)
    body["messages"][0] = {"role": "user", "content": "hi", "mood": "glad"}
    with pytest.raises(ConfigError, match="does not use 'mood'"):
        parse.chat(body, template, {})
    assert len(caplog.records) == 1


def test_what_a_folder_asks_for_is_the_default_of_requests() -> None:
    usual = {
        "temperature": 0.6, "top_k": 50, "bias": ["5=-inf"], "stop": ["END"], "min_tokens": 9, "max_tokens": 30
    }  # fmt: skip
    asked = parse.completion({"prompt": "a"}, usual)
    assert asked.decoding == {"temperature": 0.6, "top_k": 50, "bias": ["5=-inf"], "min_tokens": 9}
    assert asked.stop == ("END",)
    given = {
        "prompt": "a", "temperature": 0, "logit_bias": {"7": 1}, "max_tokens": 4, "stop": "x", "min_tokens": 0
    }  # fmt: skip
    asked, most = parse.completion(given, usual), {"max_tokens": 4}
    assert (
        asked.decoding == {"temperature": 0, "top_k": 50, "bias": ["7=1", "5=-inf"], "min_tokens": 0} | most
    )
    assert (asked.stop, asked.max_tokens) == (("x",), 4)
    assert parse.completion({"prompt": "a"}, {}).decoding == {"temperature": 1.0}


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [("/v1/completions", b"{", 400, "not valid JSON"), ("/v1/completions", [], 400, "table"),
    ("/v1/completions", {"prompt": 3}, 400, "prompt must be"), ("/v1/completions", {"prompt": ""}, 400, "empty"),
    ("/v1/completions", {"prompt": "a", "temperature": 1e9}, 400, "temperature"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 10**30}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "tempurature": 1}, 400, "Did you mean 'temperature'?"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {f"{n}": 1 for n in range(301)}}, 400, "at most 300"),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function"}]}, 400, "tools is not supported"),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}}, 400, "response_format is not"),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, 400,
    "does not use 'tool_calls'"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, 400, "must be text"),
    ("/v1/completions", {"prompt": "a", "n": 99}, 400, "n is 99"),
    ("/v1/completions", {"prompt": "a", "max_tokens": CONTEXT}, 400, "too many"),
    ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "no model 'other'"),
    ("/v1/chat/completions", {"messages": "hi"}, 400, "messages must be"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "parts such"),
    ("/v1/embeddings", {"input": "x"}, 400, "need an encoder"),
    ("/v1/classify", {"input": "x"}, 400, "no head for classes"),
    ("/v1/classify", {"input": "x", "echo": True}, 400, "'echo' is not a setting of this route"),
    ("/v1/translate", {"text": "x"}, 400, "not an encoder–decoder"),
    ("/v1/completions", b"x" * 30_000, 413, "30,000|20,000 bytes")], ids=lambda value: str(value)[:24],
)  # fmt: skip
def test_mistakes_are_told(quick: Running, path: str, body: object, status: int, said: str) -> None:
    found, answer, _ = quick.ask(path, body)
    assert found == status, answer
    assert any(words in answer["error"]["message"] for words in said.split("|"))


def test_the_key_is_asked_for(quick: Running) -> None:
    assert quick.ask("/v1/models", key="")[0] == 401
    assert quick.ask("/v1/models", key="secre")[0] == 401
    status, models, *_ = quick.ask("/v1/models")
    assert status == 200
    assert {"id", "object", "created", "owned_by"} <= models["data"][0].keys(), "what OpenAI's client reads"
    assert quick.ask("/health", key="")[0] == 200


def test_one_that_leaves_frees_its_slot(quick: Running) -> None:
    for stream in (True, False):
        body = json.dumps({"prompt": "a", "max_tokens": 500, "stream": stream})
        with halted(quick):
            with socket.create_connection(("127.0.0.1", quick.port)) as one:
                head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret"
                one.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
                quick.until("open_requests", 1)
            quick.until("open_requests", 0)


def test_hostile_requests_harm_nobody(quick: Running) -> None:
    """Drawn: malformed, giant, slow and cut-off requests, and beside them those that must not notice."""
    draw = random.Random(7)
    good = json.dumps({"prompt": "a", "max_tokens": 3, "temperature": 0}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(good) + good

    def hostile(kind: int, seed: int) -> None:
        own = random.Random(seed)
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", quick.port), timeout=5) as one,
        ):
            if kind == 0:  # noise
                one.sendall(own.randbytes(own.randint(1, 4000)))
            elif kind == 1:  # bytes of a good request changed
                raw = bytearray(whole)
                for _ in range(own.randint(1, 6)):
                    raw[own.randrange(len(raw))] = own.randrange(256)
                one.sendall(raw)
            elif kind == 2:  # cut off
                one.sendall(whole[: own.randrange(1, len(whole))])
                if own.random() < 0.5:
                    one.shutdown(socket.SHUT_WR)
            elif kind == 3:  # giant: announced, or sent
                one.sendall(head + b"Content-Length: 99999999999\r\n\r\n" + b"[" * 50_000)
            elif kind == 4:  # a head without an end
                one.sendall(head + b"X: " + b"y" * 100_000)
            else:  # deep, or wide
                body = own.choice(
                    [b"[" * 9000, b'{"prompt":' * 900, b'{"prompt": [' + b"1," * 9000 + b"1]}", b"\xff\xfe"]
                )
                one.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            one.settimeout(own.choice([0.01, 0.2, 2.0]))
            one.recv(1000)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        bad = [pool.submit(hostile, draw.randrange(6), draw.random().__hash__()) for _ in range(500)]
        for _ in range(60):
            status, answer, _ = quick.ask("/v1/completions", json.loads(good))
            assert status == 200 or status == 429
            assert status == 429 or answer["choices"][0]["text"] == "bcd"
        for one in bad:
            one.result()
    assert quick.process.poll() is None
    quick.until("open_requests", 0)
    quick.until("worker_restarts", 0)
    assert quick.ask("/v1/completions", json.loads(good))[1]["choices"][0]["text"] == "bcd"


def test_a_body_that_comes_too_slowly_is_given_up(quick: Running) -> None:
    with socket.create_connection(("127.0.0.1", quick.port), timeout=10) as one:
        one.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: 50\r\n\r\n{"
        )
        assert b" 408 " in one.recv(1000)


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_what_it_had_is_made_anew(tmp_path: Path) -> None:
    with served(folder(tmp_path, 20), "slots=2", "waiting=2") as running:
        first = worker_of(running)
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            body = {"prompt": "a", "max_tokens": 200}
            whole = pool.submit(running.ask, "/v1/completions", body)
            stream = pool.submit(running.ask, "/v1/completions", body | {"stream": True})
            while running.gauge("generated_tokens_total") < 6:
                time.sleep(0.01)
            os.kill(first, signal.SIGKILL)
            status, answer, _ = whole.result()
            assert (status, len(answer["choices"][0]["token_ids"])) == (200, 200)
            assert "has been restarted" in stream.result()[1].splitlines()[-2]
        assert worker_of(running) != first
        assert running.gauge("worker_restarts") == 1
        status, answer, _ = running.ask("/v1/completions", {"prompt": [POISON], "max_tokens": 4})
        lost = "The worker died twice while it served this request."
        assert (status, answer["error"]["message"]) == (503, lost)
        assert running.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200


def worker_of(running: Running) -> int:
    """The process id of the server's one child beside the one that renders chat templates."""
    (worker,) = (
        child for child in children_of(running.process.pid)
        if b"render.py" not in Path(f"/proc/{child}/cmdline").read_bytes()
    )  # fmt: skip
    return worker


@contextlib.contextmanager
def halted(running: Running) -> Iterator[None]:
    """Inside, the worker stands still, so that no request ends by being served."""
    worker = worker_of(running)
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


def children_of(process: int) -> list[int]:
    """Of its main thread."""
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_it_stops_when_the_requests_under_way_are_done(tmp_path: Path) -> None:
    with served(folder(tmp_path, 20), "slots=2") as running:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            late = pool.submit(running.ask, "/v1/completions", {"prompt": "a", "max_tokens": 40})
            while running.gauge("generated_tokens_total") < 3:
                time.sleep(0.01)
            worker = worker_of(running)
            running.process.send_signal(signal.SIGTERM)
            status, answer, _ = late.result()
            assert (status, len(answer["choices"][0]["token_ids"])) == (200, 40)
        assert running.process.wait(20) == 0
        assert not Path(f"/proc/{worker}").exists()
        with pytest.raises(OSError):
            running.ask("/health")


def test_a_thousand_requests_at_twice_the_capacity(tmp_path: Path) -> None:
    """While the engine stands still, all requests beyond the slots and the queue are refused at once, and no others;
    those that were accepted are then served in full; and memory does not grow with their number."""
    with served(folder(tmp_path, 1), "slots=8", "waiting=16") as running:
        bench = loaded(Path(__file__).parents[2] / "benchmarks" / "deploy_measured.py")
        client = bench.Client(host="127.0.0.1", port=running.port, vocabulary=VOCABULARY)
        draw = random.Random(0)

        async def served_and_refused(count: int, accepted: int) -> None:
            with halted(running):
                asks = [client.ask(draw.randint(4, 40), 20, draw) for _ in range(count)]
                waiting, refused = {asyncio.ensure_future(ask) for ask in asks}, []
                while len(waiting) > accepted:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    refused += [ask.result() for ask in done]
            assert refused == [429] * (count - accepted)
            assert [len(answer.times) for answer in await asyncio.gather(*waiting)] == [20] * accepted

        asyncio.run(served_and_refused(50, accepted=24))
        before = memory(running)
        for _ in range(19):
            asyncio.run(served_and_refused(50, accepted=24))
        grown = memory(running) - before
        assert grown < 24 << 20, f"memory has grown by {grown >> 20} MiB"
        completions = 'requests_total{route="completions",status="%d"}'
        with concurrent.futures.ThreadPoolExecutor(25) as pool, halted(running):
            body = {"prompt": "a", "max_tokens": 20}
            asked = [pool.submit(running.ask, "/v1/completions", body) for _ in range(25)]
            running.until(completions % 429, 20 * 26 + 1)
        found = [each.result() for each in asked]
        assert Counter(status for status, _, _ in found) == {200: 24, 429: 1}
        assert {headers.get("retry-after") for status, _, headers in found if status == 429} == {"1"}
        assert running.gauge(completions % 200) == 21 * 24
        assert running.gauge("open_requests") == 0


def test_a_stream_that_its_client_leaves_before_it_begins_is_cancelled() -> None:
    from penstock.serve.server import Service

    backend = Backend({"slots": 1, "waiting": 0}, opener="")
    body = json.dumps({"prompt": [1, 2], "stream": True}).encode()
    received = iter([{"type": "http.request", "body": body}])

    async def receive() -> dict[str, Any]:
        return next(received, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    async def ask() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""
        }  # fmt: skip
        await Service(backend=backend, config=ServeConfig(), name="x").app()(scope, receive, send)

    asyncio.run(ask())
    assert backend.open == 0


def memory(running: Running) -> int:
    """Bytes of server and worker."""
    pages = [
        int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        for pid in (running.process.pid, worker_of(running))
    ]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def tiny(family: str, where: Path) -> Path:
    """A small model with random weights, and the tokenizer of bytes, as a run exports them."""
    import dataclasses

    import torch

    import penstock
    from penstock.config.model import UniversalConfig, with_stacks
    from penstock.data.text.tokenizers import Bytes

    torch.manual_seed(1)
    words, small = where / "words", {"width": 32, "depth": 2, "heads": 2, "mlp_width": 64}
    words.mkdir(parents=True)
    Bytes().save(words)
    model = penstock.PRESETS[family]
    if isinstance(model, UniversalConfig):
        (words / "config.json").write_text('{"id2label": {"0": "in order", "1": "swapped"}}')
        config = with_stacks(model, lambda stack: dataclasses.replace(stack, **small))
        config = dataclasses.replace(config, vocabulary=Bytes.size, sequence=96, head="both")
    elif isinstance(model, penstock.Seq2SeqConfig):
        sides = {side: dataclasses.replace(getattr(model, side), **small) for side in ("encoder", "decoder")}
        config = dataclasses.replace(model, vocabulary=Bytes.size, sequence=48, decoder_sequence=48, **sides)
    else:
        config = dataclasses.replace(model, **small, kv_heads=None, vocabulary=Bytes.size, sequence=96)
    penstock.save_pretrained(penstock.create(config), where / family, beside=words)
    return where / family


@pytest.mark.sweep
def test_one_model_of_two_branches_writes_and_tells_classes(tmp_path: Path) -> None:
    from penstock.infer.encode import Classifier
    from penstock.infer.generator import Generator

    where, texts = tiny("universal-tiny", tmp_path), ["seven and eight", "import os"]
    with served(where, "slots=2", opener=REAL) as running:
        written = running.ask("/v1/completions", {"prompt": texts, "max_tokens": 6, "temperature": 0})[1]
        told = running.ask("/v1/classify", {"input": texts})[1]["data"]
        assert running.ask("/v1/embeddings", {"input": texts})[0] == 400
    for one, expected in zip(told, Classifier(where).classify(texts), strict=True):
        assert one["label"] == expected.label in ("in order", "swapped")
        assert one["probs"] == pytest.approx(expected.probabilities, abs=1e-5)
    with Generator(where) as generator:
        alone = generator.generate(texts, decoding=Decoding(max_tokens=6, temperature=0.0))
    assert [choice["text"] for choice in written["choices"]] == [one.text for one in alone]


@pytest.mark.slow
def test_images_are_classified_as_the_classifier_does(tmp_path: Path) -> None:
    import base64

    import penstock
    from helpers.images import encoded, photo
    from penstock.infer.encode import Classifier

    sizes = {"width": 32, "depth": 1, "heads": 2, "mlp_width": 32, "image_size": 32, "classes": 3}
    penstock.save_pretrained(penstock.create(penstock.ViTConfig(**sizes)), tmp_path / "vit")
    files = [encoded(photo(400, 300, seed), "JPEG") for seed in (1, 2)]
    expected = Classifier(tmp_path / "vit").classify(files)
    inline = [f"data:image/jpeg;base64,{base64.b64encode(file).decode()}" for file in files]
    with served(tmp_path / "vit", opener=REAL) as running:
        both = running.ask("/v1/classify", {"input": inline})[1]
        alone = running.ask("/v1/classify", files[0])[1]
        for body, problem in (
            ({"input": "a river"}, "in base64"),
            (b"no image", "Image 1 cannot be read: it is no"),
        ):
            status, answer, _ = running.ask("/v1/classify", body)
            assert (status, problem in answer["error"]["message"]) == (400, True), answer
        for route in ("completions", "embeddings"):
            assert running.ask(f"/v1/{route}", {("prompt", "input")[route == "embeddings"]: "x"})[0] == 400
    assert alone["data"] == both["data"][:1]
    for one, wanted in zip(both["data"], expected, strict=True):
        assert one["label"] == both["classes"][one["probs"].index(max(one["probs"]))] == wanted.label
        assert one["probs"] == pytest.approx(wanted.probabilities, abs=1e-5)


@pytest.mark.sweep
def test_a_compiled_worker_makes_the_tokens_of_an_eager_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.serve.worker import opened

    made = {}
    graphs = []
    monkeypatch.setattr(
        "penstock.decode.static.BACKEND", lambda graph, _: graphs.append(graph) or graph.forward
    )
    for family in ("llama-tiny", "marian-tiny"):
        where = tiny(family, tmp_path / family)
        for compile in ("none", "whole"):
            config = ServeConfig(slots=3, cache="slots", compile=compile)  # type: ignore[arg-type]
            one = opened({**to_dict(config), "model": str(where)})
            before = len(graphs)
            assert bool(graphs) == (compile == "whole" or family == "marian-tiny"), "before the first request"
            made[family, compile] = texts_of(one)
            assert len(graphs) == before
        assert made[family, "none"] == made[family, "whole"]
        assert len(set(map(tuple, made[family, "none"]))) > 1
    with pytest.raises(ConfigError, match="this model generates none"):
        opened({**to_dict(config), "model": str(tiny("bert-tiny", tmp_path / "bert"))})
    with pytest.raises(ConfigError, match="use cache=slots"):
        ServeConfig(compile="whole")
    with pytest.raises(ConfigError, match="exchange results"):
        ServeConfig(compile="whole", cache="slots", tp=2)


@pytest.mark.parametrize(("family", "prompt"), [("gpt", 20), ("marian-tiny", 50)])
def test_texts_wait_for_a_cache_that_cannot_hold_all(family: str, prompt: int) -> None:
    """A source takes no space in it."""
    from penstock.decode.engine import Engine, Request

    model, config = generation.tiny(family), ServeConfig(slots=4, tokens=64)
    engine = Engine(model, slots=4, cache="paged", tokens=64, start=0)
    about = {"context": engine.context, "source": int(bool(model.graph.remembered))}
    sent: list[dict[str, Any]] = []
    link: Any = SimpleNamespace(send=lambda **message: sent.append(message))
    worker = Worker(Opened(engine, Request, about), limits_of(to_dict(config), about), link)
    for number in range(4):
        decoding = {"max_tokens": 30, "ignore_end": True}
        worker._take({"job": number, "ids": [1] * prompt, "decoding": decoding})
    while worker.scheduler.running or worker.scheduler.waiting:
        worker._turn()
    pieces = [piece for message in sent for piece in message["pieces"]]
    assert sorted(number for number, _, finished, _ in pieces if finished) == [0, 1, 2, 3]


def texts_of(one: Opened) -> list[list[int]]:
    """What a worker's engine makes of some prompts, which come as slots are free."""
    assert one.engine is not None
    prompts = [
        [draw.randrange(256) for _ in range(draw.randint(2, 40))] for draw in map(random.Random, range(7))
    ]
    requests = [
        one.request(ids=tuple(row), decoding=Decoding(max_tokens=8, ignore_end=True)) for row in prompts
    ]
    return [tokens for tokens, _ in generation.served(one.engine, requests)]


@pytest.mark.parametrize("form", sweep(["fp8", "mxfp4"], (), slow=["fp8"]))
def test_a_folder_in_its_published_form_is_served_to_openais_client(form: str, tmp_path: Path) -> None:
    """With the texts of the values that its weights have; and quantised to the weights that these values have."""
    from openai import OpenAI

    import penstock
    from helpers.published import in_fp8, in_mxfp4
    from penstock.compress.quantise import quantise_folder
    from penstock.config.quantise import QuantiseOptions

    name, publish = {"fp8": ("deepseek-tiny", in_fp8), "mxfp4": ("gpt-oss-tiny", in_mxfp4)}[form]
    plain = small_folders.folder(name, tmp_path, width=64)
    (plain / "chat_template.jinja").write_text(TEMPLATE)
    published = tmp_path / "published"
    publish(plain, published)
    messages, asked = [{"role": "user", "content": "How high?"}], {"model": "published", "temperature": 0}
    with penstock.Generator(plain) as made:
        prompts = ["The river", made.conversation(messages)]
        expected = [made.generate(prompt, max_tokens=9)[0].text for prompt in prompts]
    with served(published, opener=REAL) as running:
        client = OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0)
        text = client.completions.create(prompt="The river", max_tokens=9, **asked).choices[0].text
        said = client.chat.completions.create(messages=messages, max_tokens=9, **asked).choices[0].message
        client.close()
    assert [text, said.content] == expected
    for bits in ("int8", "int4"):
        small = [tmp_path / f"{bits}-{each.name}" for each in (plain, published)]
        for each, to in zip((plain, published), small):
            quantise_folder(each, to, QuantiseOptions(format=bits))  # type: ignore[arg-type]
        one, other = (penstock.from_pretrained(each).state_dict() for each in small)
        assert all(one[name].equal(tensor) for name, tensor in other.items())


@pytest.mark.parametrize(
    ("family", "tp", "few_bits"),
    sweep(
        [
            ("llama-tiny", 1, False), ("marian-tiny", 1, False), ("bert-tiny", 1, False), ("llama-tiny", 2, False),
            ("marian-tiny", 1, True), ("bert-tiny", 1, True),
        ],
        (),
        slow=[("llama-tiny", 1, False)],
    ),
)  # fmt: skip
def test_real_models_are_served(family: str, tp: int, few_bits: bool, tmp_path: Path) -> None:
    """Ids are those of the engine alone, whatever else runs beside it; vectors are those of the encoder alone."""
    import torch

    from penstock.compress.quantise import quantise_folder
    from penstock.config.plan import Plan
    from penstock.config.quantise import QuantiseOptions
    from penstock.decode.engine import Engine, Request
    from penstock.infer.encode import Embedder
    from penstock.infer.load import loaded

    where = tiny(family, tmp_path)
    if few_bits:
        quantise_folder(where, tmp_path / "few bits", QuantiseOptions(format="int8"))
        where = tmp_path / "few bits"
    found = loaded(where, Plan(), weights="auto", tokenizer=None)
    prompts = [
        [draw.randrange(256) for _ in range(draw.randint(2, 40))] for draw in map(random.Random, range(12))
    ]
    with served(where, "slots=3", "waiting=64", f"tp={tp}", opener=REAL) as running:
        if family == "bert-tiny":
            answer = running.ask("/v1/embeddings", {"input": prompts})[1]
            for row, one in zip(prompts, answer["data"], strict=True):
                alone = Embedder(where).embed([row])[0]
                torch.testing.assert_close(torch.tensor(one["embedding"]), alone, rtol=1e-4, atol=1e-5)
            assert running.ask("/v1/completions", {"prompt": "a"})[0] == 400
            return
        engine = Engine(found.model, slots=1, start=found.start, ends=found.ends)
        requests = [Request(ids=tuple(row), decoding=Decoding(max_tokens=8)) for row in prompts]
        expected = [tokens for tokens, _ in generation.served(engine, requests)]
        if family == "marian-tiny":
            answer = running.ask("/v1/translate", {"text": ["seven", "forty-two"], "max_tokens": 8})[1]
            assert len(answer["translations"]) == 2
        body = {"prompt": prompts, "max_tokens": 8, "temperature": 0}
        if family == "llama-tiny" and tp == 1:
            from penstock.infer.score import Scorer

            for one in running.ask("/v1/completions", body | {"echo": True, "logprobs": 1})[1]["choices"]:
                logs = torch.tensor(one["logprobs"]["token_logprobs"][1:])
                wanted = torch.tensor(Scorer(found.model)(one["token_ids"]).logs)
                torch.testing.assert_close(logs, wanted, rtol=1e-4, atol=1e-4)
        choices = running.ask("/v1/completions", body)[1]["choices"]
        assert [one["token_ids"] for one in choices] == expected
        if tp > 1:
            worker = worker_of(running)
            (other,) = children_of(worker)
            os.kill(other, signal.SIGKILL)
            running.until("worker_restarts", 1, seconds=60)
            again = running.ask("/v1/completions", body)[1]["choices"]
            assert [one["token_ids"] for one in again] == expected
            assert worker_of(running) != worker
