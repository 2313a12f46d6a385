"""Requests as answers of the engine: prompts are encoded, limits checked, and text is made of tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..decoding import Choice, Prompt, row_seed
from ..files import UserError
from .answers import Form, Listener, Piece, Reader
from .engine import Answer, Engine, Text
from .metrics import Metrics
from .models import Models, ServedModel
from .requests import ChatRequest, CompletionRequest, check_limits
from .settings import ApiError, Settings


@dataclass
class Job:
    """One request that is being answered. Whoever has it must close it."""

    listener: Listener
    form: Form
    is_stream: bool
    has_usage: bool  # asked for at the end of a stream
    held: contextlib.AsyncExitStack

    def pieces(self) -> AsyncIterator[Piece]:
        return self.listener.pieces()

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return self.form.whole(pieces, len(self.listener.readers), self.listener.usage())

    def opening(self) -> list[dict[str, Any]]:
        if not self.form.is_chat:
            return []
        return [self._with_usage(self.form.opening(reader.index)) for reader in self.listener.readers]

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self._with_usage(self.form.chunk(piece))

    def closing(self) -> list[dict[str, Any]]:
        return [self.form.closing(self.listener.usage())] if self.has_usage else []

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        return {**chunk, "usage": None} if self.has_usage else chunk

    async def close(self) -> None:
        self.listener.cancel()
        await self.held.aclose()


class Service:
    """Models, engine and counts of a server."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.metrics = settings, Metrics()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.engine = Engine(
            settings.max_concurrent, settings.max_queue, settings.prefix_cache_mb * 2**20, self.metrics, self._wake_all
        )
        self.models = Models(settings, self.engine.forget)
        self.metrics.gauges = {
            "running_sequences": ("Answers that are being generated.", lambda: self.engine.num_running),
            "waiting_sequences": ("Answers that wait for a place.", lambda: self.engine.num_waiting),
            "prefix_cache_bytes": ("Size of the prefix cache.", lambda: self.engine.prefixes.num_bytes),
            "loaded_models": ("Models in memory.", lambda: len(self.models.held())),
        }

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.engine.start()

    def _wake_all(self, functions: list[Callable[[], None]]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(_call_each, functions)

    def model_entries(self) -> list[dict[str, Any]]:
        held = self.models.held()
        return [
            {"id": name, "object": "model", "created": _changed(path), "owned_by": "mambakit", "loaded": name in held}
            for name, path in self.models.places().items()
        ]

    async def complete(self, request: CompletionRequest) -> Job:
        def prompts(served: ServedModel) -> list[Prompt]:
            return [self._prompt(served, each) for each in request.prompts()]

        return await self._begin(request, request.logprobs, prompts)

    async def chat(self, request: ChatRequest) -> Job:
        def prompts(served: ServedModel) -> list[Prompt]:
            if served.template is None:
                message = (
                    f"the model {served.id} has no chat template: it was not trained on conversations, or the template "
                    "is not in its folder (chat_template.jinja or tokenizer_config.json); use /v1/completions"
                )
                raise ApiError(400, message, param="messages", code="no_chat_template")
            try:
                text = served.template.render([message.plain() for message in request.messages])
            except UserError as error:
                raise ApiError(400, str(error), param="messages", code="refused_by_template") from None
            tokens = served.tokenizer.encode(text, add_special_tokens=False).ids
            if not tokens:
                raise ApiError(400, "the chat template makes an empty text of these messages", param="messages")
            return [self._checked(served, Prompt(tokens, [], []))]

        wanted = (request.top_logprobs or 0) if request.logprobs else None
        return await self._begin(request, wanted, prompts)

    async def _begin(
        self,
        request: CompletionRequest | ChatRequest,
        num_likeliest: int | None,
        make_prompts: Callable[[ServedModel], list[Prompt]],
    ) -> Job:
        longest = check_limits(request, self.settings)
        began = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            served = await stack.enter_async_context(self.models.use(request.model))
            prompts = await asyncio.to_thread(make_prompts, served)  # encoding a long text takes a while
            listener, stops = Listener(), request.stops()
            is_stream = bool(request.stream)
            num_answers = request.n or 1
            for number, prompt in enumerate(prompts):
                text = Text(served.id, served.model, prompt.tokens)
                for place in range(number * num_answers, (number + 1) * num_answers):
                    seed = row_seed(request.seed, place)
                    answer = Answer(
                        text, Choice(request.sampling(), seed, prompt.first_tokens, num_likeliest), longest,
                        frozenset(served.end_tokens), began + self.settings.timeout, listener.wake,
                        wakes_each=is_stream or bool(stops), began=began,
                    )  # fmt: skip
                    listener.readers.append(Reader(place, answer, served.tokenizer, prompt, stops))
            self.engine.submit([reader.answer for reader in listener.readers])
            has_usage = bool(request.stream_options and request.stream_options.include_usage)
            form = Form(isinstance(request, ChatRequest), served.id, served.tokenizer, num_likeliest)
            return Job(listener, form, is_stream, has_usage, stack.pop_all())

    def _prompt(self, served: ServedModel, given: str | list[int]) -> Prompt:
        if isinstance(given, str):
            try:
                found = Prompt.of(served.tokenizer, given, served.end_tokens, served.model.config.vocab_size)
            except UserError as error:
                raise ApiError(400, str(error), param="prompt", code="invalid_value") from None
            return self._checked(served, found)
        return self._checked(served, Prompt(given, [], []))

    def _checked(self, served: ServedModel, prompt: Prompt) -> Prompt:
        most, vocab_size = self.settings.max_prompt_tokens, served.model.config.vocab_size
        if len(prompt.tokens) > most:
            message = (
                f"the prompt has {len(prompt.tokens)} tokens; need at most {most} (--max-prompt-tokens of the server)"
            )
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")
        if max(prompt.tokens) >= vocab_size:
            message = f"the prompt has the token {max(prompt.tokens)}, outside the vocabulary 0…{vocab_size - 1}"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return prompt


def _call_each(functions: list[Callable[[], None]]) -> None:
    for function in set(functions):
        function()


def _changed(path: Any) -> int:
    try:
        return int(path.stat().st_mtime)
    except OSError:  # deleted since
        return 0
