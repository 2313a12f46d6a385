"""Requests as answers of the engine: prompts are encoded, limits checked, and text is made of tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..decoding import Choice, Memory, Prompt, Saved, row_seed
from ..files import UserError
from .answers import Form, Listener, Piece, Reader
from .engine import Answer, Engine, Text
from .metrics import Metrics
from .models import Models, ServedModel
from .requests import ChatRequest, CompletionRequest, check_limits
from .settings import STATES, ApiError, Settings
from .states import States


@dataclass
class Job:
    """One request that is being answered. Whoever has it must close it."""

    listener: Listener
    form: Form
    is_stream: bool
    has_usage: bool  # asked for at the end of a stream
    held: contextlib.AsyncExitStack
    keep: Callable[[], Awaitable[None]]  # saves the state, where the request asks for it; after the last piece

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
        self.states = States(settings.states) if settings.states is not None else None
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
        for name in STATES:
            if getattr(request, name) is not None and self.states is None:
                message = f"{name} needs a server that was started with --states DIR"
                raise ApiError(400, message, param=name, code="no_states")
        if request.save_state is not None and self.states is not None:
            self.states.check_free(request.save_state)

        def texts(served: ServedModel) -> list[tuple[Prompt, Text]]:
            if request.restore_state is None or self.states is None:
                return [_begun(served, self._prompt(served, each)) for each in request.prompts()]
            saved = self.states.read(request.restore_state, served.model)
            return [_continued(served, saved, self._prompt(served, each, saved)) for each in request.prompts()]

        return await self._begin(request, request.logprobs, texts, request.save_state)

    async def chat(self, request: ChatRequest) -> Job:
        def texts(served: ServedModel) -> list[tuple[Prompt, Text]]:
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
            return [_begun(served, self._checked(served, Prompt(tokens, [], [])))]

        has_logprobs = request.top_logprobs is not None if request.logprobs is None else request.logprobs
        wanted = (request.top_logprobs or 0) if has_logprobs else None
        return await self._begin(request, wanted, texts)

    async def _begin(
        self,
        request: CompletionRequest | ChatRequest,
        num_likeliest: int | None,
        make_texts: Callable[[ServedModel], list[tuple[Prompt, Text]]],
        save_as: str | None = None,
    ) -> Job:
        longest = check_limits(request, self.settings)
        began = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            served = await stack.enter_async_context(self.models.use(request.model))
            texts = await asyncio.to_thread(make_texts, served)  # encoding a long text takes a while
            listener, stops = Listener(), request.stops()
            is_stream = bool(request.stream)
            num_answers = request.n or 1
            seed = None if request.seed is None else request.seed % 2**63
            for number, (prompt, text) in enumerate(texts):
                for place in range(number * num_answers, (number + 1) * num_answers):
                    own = row_seed(seed, place)
                    answer = Answer(
                        text, Choice(request.sampling(), own, prompt.first_tokens, num_likeliest), longest,
                        frozenset(served.end_tokens), began + self.settings.timeout, listener.wake,
                        wakes_each=is_stream or bool(stops), began=began,
                    )  # fmt: skip
                    listener.readers.append(Reader(place, answer, served.tokenizer, prompt, stops))
            self.engine.submit([reader.answer for reader in listener.readers])
            has_usage = bool(request.stream_options and request.stream_options.include_usage)
            form = Form(isinstance(request, ChatRequest), served.id, served.tokenizer, num_likeliest)

            async def keep() -> None:
                if save_as is not None and self.states is not None:
                    await self._save(save_as, served, listener.readers[0], self.states)

            return Job(listener, form, is_stream, has_usage, stack.pop_all(), keep)

    async def _save(self, name: str, served: ServedModel, reader: Reader, states: States) -> None:
        """Keep the state after an answer. A stop text is part of it; what the engine chose after it is not.

        Saved is the state before the last token; the answer is read once more up to there, from the prompt's memory.
        """
        text = reader.answer.text
        tokens = [*text.tokens, *(token.token for token in reader.answer.tokens[: reader.num_tokens])]
        start = text.memory if reader.num_tokens else text.start
        if start is None or len(start.tokens) < len(tokens) - 1:
            if len(tokens) < 2:
                raise ApiError(409, "one token alone has no state to save", param="save_state", code="nothing_to_save")
            listener = Listener()
            whole = Text(served.key, served.model, tokens[:-1], memory=start, is_shared=False)
            deadline = time.monotonic() + self.settings.timeout
            answer = Answer(whole, Choice(), 0, frozenset(), deadline, listener.wake, wakes_each=False)
            self.engine.submit([answer])
            await listener.ended(answer)
            start = whole.memory
        assert start is not None
        await asyncio.to_thread(states.write, name, served.model, reader.answer.choice, start.state, tokens)

    def _prompt(self, served: ServedModel, given: str | list[int], after: Saved | None = None) -> Prompt:
        if not isinstance(given, str):
            return self._checked(served, Prompt(given, [], []))
        if after is not None and given == "":
            return Prompt([], [], [])
        sizes = served.end_tokens, served.model.config.vocab_size
        try:
            found = Prompt.of(served.tokenizer, given, *sizes, goes_on=after is not None)
        except UserError as error:
            raise ApiError(400, str(error), param="prompt", code="invalid_value") from None
        return self._checked(served, found)

    def _checked(self, served: ServedModel, prompt: Prompt) -> Prompt:
        most, vocab_size = self.settings.max_prompt_tokens, served.model.config.vocab_size
        if len(prompt.tokens) > most:
            message = (
                f"the prompt has {len(prompt.tokens)} tokens; need at most {most} (--max-prompt-tokens of the server)"
            )
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")
        if max(prompt.tokens, default=0) >= vocab_size:
            message = f"the prompt has the token {max(prompt.tokens)}, outside the vocabulary 0…{vocab_size - 1}"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return prompt


def _begun(served: ServedModel, prompt: Prompt) -> tuple[Prompt, Text]:
    return prompt, Text(served.key, served.model, prompt.tokens)


def _continued(served: ServedModel, saved: Saved, prompt: Prompt) -> tuple[Prompt, Text]:
    """A prompt that goes on from a saved state. Others do not get to read on from what a file says."""
    before = list(saved.tokens) or [saved.token]
    tokens = [*before, *prompt.tokens]
    start = Memory(saved.state, saved.seen.new_empty(1, 0), before[:-1])
    text = Text(
        served.key, served.model, tokens, num_cached=len(before) - 1, memory=start, start=start, is_shared=False
    )
    return Prompt(tokens, prompt.first_tokens, prompt.space), text


def _call_each(functions: list[Callable[[], None]]) -> None:
    for function in set(functions):
        function()


def _changed(path: Any) -> int:
    try:
        return int(path.stat().st_mtime)
    except OSError:  # deleted since
        return 0
