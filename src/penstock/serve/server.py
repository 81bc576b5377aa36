"""The HTTP side of `penstock serve`: OpenAI's routes over one worker (Starlette and uvicorn).

Requests are limited in bytes and time before they are parsed, and parsed before they are queued. If the queue is full,
the answer is 429 at once. A client that disconnects ends its request.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hmac
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.boundary.files import quoted
from penstock.config.decoding import USUAL_TOKENS
from penstock.data.text.chat import Template
from penstock.data.text.tokenizers import Tokenizer
from penstock.errors import ConfigError, PenstockError
from penstock.infer.labels import TextLabels
from penstock.infer.text import Spelling, needed, prompt_numbers
from penstock.infer.usual import lengths
from penstock.serve import answers, parse
from penstock.serve.answers import Piece, Text
from penstock.serve.backend import Backend, Lost, Refused, Ticket
from penstock.serve.metrics import Metrics
from penstock.serve.parse import TextRequest
from penstock.serve.scheduler import QueueFull
from penstock.serve.settings import ServeConfig

log = logging.getLogger(__name__)
RETRY_SECONDS = 1
TEXT_BYTES, IMAGE_BYTES = 1 << 20, 1 << 25
"""Maximum bytes of a body, unless the settings say otherwise."""
LONG_TEXT = 20_000
"""Characters above which a text is tokenised in a thread, so that the event loop can serve other requests."""


class Fault(Exception):
    """An error that is sent as the answer."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(kw_only=True)
class Service:
    """The state that the routes share."""

    backend: Backend
    config: ServeConfig
    name: str
    tokenizer: Tokenizer | None = None
    template: Template | None = None
    key: str | None = None
    metrics: Metrics = field(default_factory=Metrics)
    stopping: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    """Start time of the service, in seconds since 1970."""
    _rendering: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def source(self) -> bool:
        """Whether the model translates a source."""
        return bool(self.backend.about.get("source"))

    @functools.cached_property
    def spelling(self) -> Spelling | None:
        """The spelling of tokens, if there is a tokenizer."""
        return None if self.tokenizer is None else Spelling(self.tokenizer)

    def app(self) -> Starlette:
        """The Starlette application."""
        routes = [
            ("POST", "/v1/completions", "completions", self.completions),
            ("POST", "/v1/chat/completions", "chat", self.chat),
            ("POST", "/v1/embeddings", "embeddings", self.embeddings),
            ("POST", "/v1/classify", "classify", self.classify),
            ("POST", "/v1/translate", "translate", self.translate),
            ("GET", "/health", "health", self.health),
            ("GET", "/v1/models", "v1/models", self.models),
            ("GET", "/v1/models/{name:path}", "v1/models/{name:path}", self.model),
            ("GET", "/metrics", "metrics", self.report),
            ("GET", "/v1/experts", "v1/experts", self.experts),
        ]
        origins = [*self.config.cors]
        pages = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        return Starlette(
            routes=[Route(path, self._guarded(name, work), methods=[method]) for method, path, name, work in routes],
            middleware=[pages] if origins else [],
        )  # fmt: skip

    def _guarded(
        self, route: str, work: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A route that counts its answers, checks the key, and turns errors into answers."""

        async def answer(request: Request) -> Response:
            try:
                if route != "health":
                    self._require_key(request)
                response = await work(request)
            except Fault as fault:
                response = _fault(fault.status, str(fault), fault.kind)
            except QueueFull as full:
                response = _fault(429, f"{full} Try again later.", "rate_limit_error")
                response.headers["Retry-After"] = str(RETRY_SECONDS)
            except (ConfigError, Refused) as problem:
                response = _fault(400, str(problem), "invalid_request_error")
            except Lost as problem:
                response = _fault(503, str(problem), "server_error")
            except ClientDisconnect:
                self.metrics.cancelled += 1
                response = Response(status_code=499)
            except Exception:
                log.exception("A request failed because of an error in the server.")
                response = _fault(500, "The server has failed; its log says more.", "server_error")
            self.metrics.requests[route, response.status_code] += 1
            return response

        return answer

    def _require_key(self, request: Request) -> None:
        if self.key is None:
            return
        scheme, _, sent_key = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(sent_key.strip().encode("utf-8", "replace"), self.key.encode())
        if scheme.lower() != "bearer" or not right:
            raise Fault(401, "Send the server's key: Authorization: Bearer KEY.", "authentication_error")

    @property
    def images(self) -> bool:
        """Whether the model reads images."""
        return bool(self.backend.about.get("images"))

    async def _table(self, request: Request, route: str) -> dict[str, Any]:
        """The JSON object in the body, which must arrive in time and not be too long. An image alone is its `input`."""
        limit, raw = self.config.body_bytes or (IMAGE_BYTES if self.images else TEXT_BYTES), bytearray()
        large = Fault(413, f"The body has more than {limit:,} bytes, which is the most that is read.")
        length = request.headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:20]) > limit:
            raise large
        try:
            async with asyncio.timeout(self.config.body_seconds):
                async for part in request.stream():
                    raw += part
                    if len(raw) > limit:
                        raise large
        except TimeoutError:
            seconds = f"{self.config.body_seconds:g} s"
            raise Fault(408, f"The body did not come within {seconds}.") from None
        if route == "classify" and self.images and raw.lstrip()[:1] != b"{":
            return {"input": base64.b64encode(raw).decode()}
        body = parse.body_of(bytes(raw), route, max_bytes=limit)
        self._require_name(body.get("model", self.name))
        return body

    async def completions(self, request: Request) -> Response:
        """Continue texts."""
        body = await self._table(request, "completions")
        return await self._generate(request, parse.completion(body, self.backend.usual), "text_completion")

    async def chat(self, request: Request) -> Response:
        """Generate the next message of a conversation."""
        body = await self._table(request, "chat")
        async with self._rendering:  # one at a time, in a thread: a template may take seconds
            wanted = await asyncio.to_thread(parse.chat, body, self.template, self.backend.usual)
        return await self._generate(request, wanted, "chat.completion")

    async def translate(self, request: Request) -> Response:
        """Translate texts, or run any other encoder–decoder on them."""
        body = await self._table(request, "translate")
        if self.backend.about and not self.source:
            raise Fault(400, "This model is not an encoder–decoder; use /v1/completions.")
        wanted = parse.translation(body, self.backend.usual)
        prompts = await self._numbers(wanted)
        texts = self._queued(wanted, prompts)
        await self._while_there(request, _run(texts))
        return JSONResponse({
            "object": "translation", "model": self.name,
            "translations": [{"text": text.text, "finish_reason": text.finished} for text in texts],
            "usage": answers.usage(prompts, texts),
        })  # fmt: skip

    async def embeddings(self, request: Request) -> Response:
        """Return a vector for each text."""
        body = await self._table(request, "embeddings")
        packed = parse.in_base64(body)
        if self.backend.about and self.backend.about["writes"]:
            raise Fault(400, "This model generates text; embeddings need an encoder.")
        vectors, count = await self._vectors(request, body, "vectors")
        return self._listed(count, [
            {"object": "embedding", "index": i, "embedding": answers.base64_of(vector) if packed else vector}
            for i, vector in enumerate(vectors)
        ])  # fmt: skip

    async def classify(self, request: Request) -> Response:
        """Return the likeliest class of each text or image, and the probabilities of all classes."""
        body = await self._table(request, "classify")
        if self.backend.about and not self.backend.about.get("classes"):
            raise Fault(400, "This model has no head for classes; use another route.")
        shares, count = await self._vectors(request, body, "classes")
        names = self.backend.about["classes"]
        return self._listed(count, [
            {"index": i, "label": names[row.index(max(row))], "probs": row, "num_classes": len(row)}
            for i, row in enumerate(shares)
        ], classes=names)  # fmt: skip

    def _listed(self, count: int, data: list[dict[str, Any]], **more: Any) -> JSONResponse:
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({"object": "list", "model": self.name, "usage": usage, **more, "data": data})

    async def _vectors(
        self, request: Request, body: dict[str, Any], kind: str
    ) -> tuple[list[list[float]], int]:
        """The worker's vector for each text or image of a request, and the number of tokens."""
        rows: list[Any] = (
            parse.images_of(body) if self.images else [*map(self._sentence, parse.texts_of(body, "input"))]
        )
        longest = self.backend.about.get("context", 0)
        if not self.images and longest and max(map(len, rows)) > longest:
            raise Fault(400, f"A text has {max(map(len, rows)):,} tokens, but the model reads {longest:,}.")
        self.backend.require_room(1)
        ticket, begun = self._send({"compute": kind, "arguments": [rows]}), time.monotonic()
        vectors: list[list[float]] = await self._while_there(request, ticket.answer())
        self.metrics.latency.add(time.monotonic() - begun)
        count = 0 if self.images else sum(map(len, rows))
        self.metrics.prompt_tokens += count
        return vectors, count

    def _sentence(self, text: str | tuple[int, ...]) -> list[int]:
        """Token numbers of a text to embed, with the special tokens that an encoder puts around it."""
        if not isinstance(text, str):
            return list(text)
        tokenizer = needed(self.tokenizer)
        frame = tokenizer.frame()
        return [*frame.before, *tokenizer.encode([text])[0].tolist(), *frame.behind]

    async def health(self, request: Request) -> Response:
        """Answer 200 while the worker can accept requests."""
        ready = self.backend.ready.is_set() and not self.stopping
        return JSONResponse({"status": "ok" if ready else "starting"}, status_code=200 if ready else 503)

    async def models(self, request: Request) -> Response:
        """A list of the one model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The one model, by its name."""
        self._require_name(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.name, "object": "model", "created": self.started, "owned_by": "penstock",
            "context": self.backend.about.get("context"),
        }  # fmt: skip

    def _require_name(self, name: Any) -> None:
        if name != self.name:
            raise Fault(404, f"There is no model {quoted(name)} here; the model is {self.name!r}.")

    async def experts(self, request: Request) -> Response:
        """The record of experts' loads while the model serves, in the form that `penstock experts` reads."""
        if self.backend.loads is None:
            raise Fault(404, "There are no loads yet of experts that several devices host; serve with --ep.")
        return JSONResponse(self.backend.loads.to_dict())

    async def report(self, request: Request) -> Response:
        """The counters, for Prometheus."""
        text = self.metrics.text(self.backend.gauges())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _generate(self, request: Request, wanted: TextRequest, kind: str) -> Response:
        if self.backend.about and not self.backend.about["writes"]:
            route = "classify" if self.images else "embeddings"
            raise Fault(400, f"This model is an encoder, which does not generate text; use /v1/{route}.")
        prompts = await self._numbers(wanted)
        if not all(prompts):
            raise Fault(400, "A prompt is empty.")
        if wanted.scored and self.source:
            raise Fault(400, "Log-probabilities are not supported for encoder–decoders.")
        texts, created = self._queued(wanted, prompts), int(time.time())
        number = f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{uuid.uuid4().hex}"
        head = {"id": number, "created": created, "model": self.name}
        if wanted.stream:
            return _Stream(self._parts(texts, wanted, prompts, head, kind), texts)
        await self._while_there(request, _run(texts))
        if wanted.scored:
            await self._while_there(request, self._score(texts, wanted))

        def response() -> Response:
            likeliest = enumerate(answers.likeliest(texts, wanted))
            choices = [answers.choice(i, text, kind, wanted, self.spelling) for i, text in likeliest]
            return JSONResponse(
                {**head, "object": kind, "choices": choices, "usage": answers.usage(prompts, texts)}
            )

        return response() if wanted.logprobs is None else await asyncio.to_thread(response)

    async def _score(self, texts: Sequence[Text], wanted: TextRequest) -> None:
        """Score the texts one after the other, so that they need only one place in the queue."""
        for text in texts:
            arguments = [text.tokens, wanted.logprobs or 0]
            text.scores = await self._send({"compute": "scores", "arguments": arguments}).answer()

    async def _numbers(self, wanted: TextRequest) -> list[list[int]]:
        """Token numbers of all prompts."""
        long = sum(len(prompt) for prompt in wanted.prompts) > LONG_TEXT

        def work() -> list[list[int]]:
            if wanted.marked:  # the template contains everything that comes before the text
                words = needed(self.tokenizer)
                return [ids.tolist() for ids, _ in words.encode_marked([*map(str, wanted.prompts)])]
            return [prompt_numbers(prompt, self.tokenizer, source=self.source) for prompt in wanted.prompts]

        return await asyncio.to_thread(work) if long else work()

    def _queued(self, wanted: TextRequest, prompts: Sequence[list[int]]) -> list[Text]:
        """Queue each prompt once per text. Raises the errors of `Backend.require_room`, and ConfigError for labels that
        are missing or unknown."""
        about, texts = self.backend.about, list[Text]()
        text = functools.partial(Text, self.tokenizer, self.metrics, wanted, source=self.source)
        if wanted.max_tokens == 0:  # prompts are only scored, one after the other
            self.backend.require_room(1)
            return [text(prompt) for prompt in prompts]
        labels = TextLabels(tuple(about.get("labels", ())), about.get("labels_in_prompts", False))
        routes = labels.numbers(wanted.prompts, wanted.label)
        self.backend.require_room(len(prompts) * wanted.best_of)
        for prompt, route in zip(prompts, routes, strict=True):
            for choice in range(wanted.best_of):
                decoding = dict(wanted.decoding)
                if not wanted.max_tokens:
                    count = 1 if self.source else len(prompt)
                    room = about.get("context", USUAL_TOKENS)
                    decoding |= lengths(self.backend.usual, decoding, count, room)
                if decoding.get("seed") is not None:
                    decoding["seed"] = (decoding["seed"] + choice) % parse.SEEDS
                texts.append(text(prompt, self._send({"ids": prompt, "decoding": decoding, "route": route})))
        return texts

    def _send(self, message: dict[str, Any]) -> Ticket:
        if self.stopping:
            raise Fault(503, "The server is stopping.", "server_error")
        return self.backend.submit(message)

    async def _while_there(self, request: Request, work: Any) -> Any:
        """The result of `work`, which is cancelled if the client disconnects or it takes longer than a request may."""
        task, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
        try:
            done, _ = await asyncio.wait(
                {task, disconnected}, timeout=self.config.seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if task in done:
                try:
                    return task.result()
                except ExceptionGroup as several:
                    raise several.exceptions[0] from None
            if disconnected in done:
                raise ClientDisconnect
            raise Fault(504, f"The request took longer than {self.config.seconds:g} s.", "timeout_error")
        finally:
            for waited in (task, disconnected):
                waited.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await waited

    async def _parts(
        self, texts: Sequence[Text], wanted: TextRequest, prompts: Sequence[list[int]], head: dict[str, Any], kind: str,
    ) -> AsyncIterator[str]:  # fmt: skip
        """Yield a stream's lines: pieces of the texts of all choices, as they are generated."""
        chunk = "chat.completion.chunk" if kind.startswith("chat") else kind

        def line(*choices: dict[str, Any], **more: Any) -> str:
            return answers.line({**head, "object": chunk, "choices": choices, **more})

        pieces: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue()

        async def run_all() -> None:
            try:
                async with asyncio.timeout(self.config.seconds):
                    await _run(texts, lambda place, piece: pieces.put_nowait((place, piece)))
            finally:
                pieces.put_nowait(None)

        task, whole = asyncio.create_task(run_all()), False
        try:
            if kind.startswith("chat"):
                for place in range(len(texts)):
                    yield line(answers.delta(place, {"role": "assistant"}, None))
            while (item := await pieces.get()) is not None:
                yield line(answers.piece(*item, kind))
            whole = True
            try:
                await task
            except (TimeoutError, ExceptionGroup) as problem:
                yield answers.line({"error": {"message": self._why(problem), "type": "server_error"}})
                return
            for place, text in enumerate(texts):
                yield line(answers.end(place, text.finished, kind))
            if wanted.usage:
                yield line(usage=answers.usage(prompts, texts))
            yield "data: [DONE]\n\n"
        finally:
            if not whole:
                self.metrics.cancelled += 1
            task.cancel()

    def _why(self, problem: BaseException) -> str:
        if isinstance(problem, ExceptionGroup):
            own = [error for error in problem.exceptions if isinstance(error, PenstockError)]
            if own:
                return str(own[0])
            log.error("A stream failed because of an error in the server.", exc_info=problem)
            return "The server has failed; its log says more."
        return f"The request took longer than {self.config.seconds:g} s."


class _Stream(StreamingResponse):
    """A stream of texts, whose generation ends with it, even if the client leaves before it begins."""

    def __init__(self, parts: AsyncIterator[str], texts: Sequence[Text]) -> None:
        super().__init__(parts, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.texts = texts

    async def __call__(self, *connection: Any) -> None:
        try:
            await super().__call__(*connection)
        finally:
            for text in self.texts:
                text.cancel()


async def _run(texts: Sequence[Text], tell: Callable[[int, Piece], None] | None = None) -> None:
    """Generate all texts; pass each piece to `tell`, after the number of its text."""
    async with asyncio.TaskGroup() as group:
        for place, text in enumerate(texts):
            group.create_task(text.run(tell and functools.partial(tell, place)))


async def _disconnected(request: Request) -> None:
    """Return when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _fault(status: int, message: str, kind: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)
