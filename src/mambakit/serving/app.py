"""The routes of the server, what they answer, and the gate before them: key, size and time of a request."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.resources
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..files import UserError
from .answers import Piece
from .metrics import Metrics
from .requests import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    ErrorAnswer,
    Health,
    ModelEntry,
    ModelList,
    refusal,
)
from .service import Job, Service
from .settings import STATES, ApiError, Settings

BODIES: dict[str, type[BaseModel]] = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
# The page is one file with its own script and style, and asks this server alone. It makes no markup of text.
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MEANINGS = {
    400: "the request is not as it should be; the message says what is wrong",
    401: "the key is missing, or is another one",
    404: "there is no such model, or state",
    408: "the request did not arrive in time (--read-timeout)",
    409: "there is a state of this name already, or the server has too many",
    413: "the body is too large (--max-body-kb)",
    429: "too many requests wait (--max-queue)",
    500: "the model cannot be used, or the server failed",
    503: "the server is stopping, or the request waited too long",
}
# With stream: each is a chunk of OpenAI's form as JSON, an error, or [DONE] at the end.
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
RETRY = {"Retry-After": {"description": "seconds to wait before asking again", "schema": {"type": "string"}}}


def make_app(service: Service) -> FastAPI:
    """The application. Its engine runs from the start of the server to its end."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(service.engine.stop)

    settings = service.settings
    app = FastAPI(title="mambakit", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    errors = _errors(*([401] if settings.api_key else []))
    asking = {**errors, **_errors(400, 404, 408, 413, 429, 500, 503)}
    events = {"text/event-stream": {"schema": EVENT}}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        found = importlib.resources.files(__package__).joinpath("page.html")
        return HTMLResponse(found.read_text(encoding="utf-8"), headers={"Content-Security-Policy": PAGE_POLICY})

    @app.get("/health", responses={200: {"model": Health}, **_errors(503)})
    async def health() -> Response:
        """Whether the server answers, and how many answers run and wait."""
        if not service.engine.is_alive:
            raise ApiError(503, "the engine has stopped; start the server again", code="engine_failed")
        running, waiting = service.engine.num_running, service.engine.num_waiting
        return JSONResponse({"status": "ok", "running": running, "waiting": waiting})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counts for Prometheus."""
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", responses={200: {"model": ModelList}, **errors})
    async def models() -> Response:
        """The models that a request may name."""
        return JSONResponse({"object": "list", "data": service.model_entries()})

    @app.get("/v1/models/{model_id:path}", responses={200: {"model": ModelEntry}, **errors, **_errors(404)})
    async def model(model_id: str) -> Response:
        """One of the models."""
        found = next((entry for entry in service.model_entries() if entry["id"] == model_id), None)
        if found is None:
            raise service.models.no_such(model_id)
        return JSONResponse(found)

    saving = _errors(409) if settings.states else {}

    @app.post("/v1/completions", responses={200: {"model": Completion, "content": events}, **asking, **saving})
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Text that follows a prompt."""
        return await _answer(request, await service.complete(body))

    @app.post("/v1/chat/completions", responses={200: {"model": ChatCompletion, "content": events}, **asking})
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """The next message of a conversation."""
        return await _answer(request, await service.chat(body))

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        return _failure(error)

    @app.exception_handler(UserError)
    async def mistake(request: Request, error: UserError) -> Response:
        return _failure(ApiError(400, str(error)))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _failure(refusal(error.errors(), BODIES.get(request.url.path)))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        messages = {404: f"there is no {where}", 405: f"{where} is not possible; see the Allow header for what is"}
        message = messages.get(error.status_code, str(error.detail))
        return _failure(ApiError(error.status_code, message, headers=error.headers))

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        """uvicorn logs it."""
        return _failure(ApiError(500, f"the server failed: {type(error).__name__}", code="fault"))

    schema: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not schema:
            schema.update(_true_schema(FastAPI.openapi(app), settings, service.models.vocab_size))
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
    app.add_middleware(_Gate, settings=settings, metrics=service.metrics)
    return app


class _Gate:
    """Takes the whole body of a request, within its limits, before anything else is done with it."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        began = time.monotonic()
        limit = self.settings.timeout + 2 * self.settings.read_timeout  # a client that does not read its answer
        try:
            self._check_host(scope)
            self._check_key(scope)
            body = await self._body(scope, receive)
            if body is not None:
                await asyncio.wait_for(self.app(scope, _with_body(body, receive), counted), limit)
        except ApiError as error:
            await _failure(error)(scope, receive, counted)
        except asyncio.TimeoutError:
            pass  # the connection is closed, since its answer is not complete
        finally:
            if scope["path"] in BODIES:
                self.metrics.add("requests", path=scope["path"], status=str(status))
                self.metrics.observe("request_seconds", time.monotonic() - began)

    def _check_host(self, scope: Scope) -> None:
        """A page of another site may have a name that leads to this machine, and so ask a server that needs no key."""
        if self.settings.api_key is not None or self.settings.host not in LOOPBACK:
            return
        given = _header(scope, b"host").decode("latin-1")
        if re.sub(r":\d*$", "", given).strip("[]").lower() not in LOOPBACK:
            message = (
                f"the server answers to localhost alone, and the request is for {given!r}; start it with --api-key"
            )
            raise ApiError(403, message, code="wrong_host")

    def _check_key(self, scope: Scope) -> None:
        key = self.settings.api_key
        if key is None or not scope["path"].startswith("/v1/"):
            return
        given = _header(scope, b"authorization")
        if not hmac.compare_digest(given, b"Bearer " + key.encode()):
            message = "the key of the server is missing, or wrong; send it as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """None where the client has gone."""
        most = self.settings.max_body_kb * 1024
        closing = {"Connection": "close"}  # the rest of the body is not read
        too_large = ApiError(
            413, f"the body is larger than {most} bytes (--max-body-kb of the server)", code="body_too_large",
            headers=closing,
        )  # fmt: skip
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length[:20]) > most:
            raise too_large
        until = time.monotonic() + self.settings.read_timeout
        body = bytearray()
        while True:
            try:
                message = await asyncio.wait_for(receive(), max(0.001, until - time.monotonic()))
            except asyncio.TimeoutError:
                seconds = f"{self.settings.read_timeout:g} s (--read-timeout of the server)"
                late = f"the body did not arrive within {seconds}"
                raise ApiError(408, late, code="request_timeout", headers=closing) from None
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > most:
                raise too_large
            if not message.get("more_body", False):
                return bytes(body)


def _header(scope: Scope, wanted: bytes) -> bytes:
    return next((bytes(value) for name, value in scope["headers"] if name == wanted), b"")


def _with_body(body: bytes, receive: Receive) -> Receive:
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _answer(request: Request, job: Job) -> Response:
    """The whole answer, or a stream of it once its first piece is there, so that what fails before has a status."""
    pieces = job.pieces()
    try:
        if job.is_stream:
            first = await _unless_gone(request, pieces.__anext__())
            events = _events(job, first, pieces)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        found = await _unless_gone(request, _all(pieces))
        await job.keep()
        answer = job.whole(found)
        await job.close()
        return JSONResponse(answer)
    except BaseException:
        await job.close()
        raise


async def _all(pieces: AsyncIterator[Piece]) -> list[Piece]:
    return [piece async for piece in pieces]


async def _unless_gone(request: Request, waiting: Any) -> Any:
    """What is waited for, unless the client goes away before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(waiting), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ApiError(499, "the client has gone")  # which nobody reads
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def _events(job: Job, first: Piece, rest: AsyncIterator[Piece]) -> AsyncIterator[str]:
    try:
        for chunk in job.opening():
            yield _event(chunk)
        yield _event(job.chunk(first))
        try:
            async for piece in rest:
                yield _event(job.chunk(piece))
            await job.keep()
        except ApiError as error:
            yield _event(error.body())
            return
        for chunk in job.closing():
            yield _event(chunk)
        yield "data: [DONE]\n\n"
    finally:
        await job.close()


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _failure(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, headers=error.headers)


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {
        status: {
            "model": ErrorAnswer,
            "description": MEANINGS[status],
            **({"headers": RETRY} if status in (429, 503) else {}),
        }
        for status in statuses
    }


def _true_schema(schema: dict[str, Any], settings: Settings, vocab_size: int) -> dict[str, Any]:
    """FastAPI's schema without the answer that it gives to wrong requests elsewhere, and with this server's limits."""
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    parts = schema["components"]["schemas"]
    for name in "HTTPValidationError", "ValidationError":
        parts.pop(name, None)
    for name in "CompletionRequest", "ChatRequest":
        for field in "max_tokens", "max_completion_tokens":
            if field in parts[name]["properties"]:
                _number(parts[name]["properties"][field])["maximum"] = settings.max_new_tokens

    def tokens(part: Any) -> None:
        if isinstance(part, dict):
            if part.get("maximum") == 2**31 - 1:
                part["maximum"] = vocab_size - 1
            if part.get("type") == "array" and part["items"].get("type") == "integer":
                part["maxItems"] = settings.max_prompt_tokens
        for each in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            tokens(each)

    tokens(parts["CompletionRequest"]["properties"]["prompt"])
    for name in STATES if settings.states is None else ():
        del parts["CompletionRequest"]["properties"][name]
    if settings.api_key:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in schema["paths"].items():
            for operation in operations.values() if path.startswith("/v1/") else ():
                operation["security"] = [{"key": []}]
    return schema


def _number(field: dict[str, Any]) -> dict[str, Any]:
    return next((part for part in field.get("anyOf", []) if part.get("type") == "integer"), field)
