"""All answers that are being generated, on one thread: prompts are read in pieces, and rows step together.

A row that ends leaves its place to one that waits, so that the batch stays full. What a row gives does not depend on
the others.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..decoding import Choice, Decoder, Memory, Token
from ..files import UserError
from ..model import MambaLM, State
from ..progress import say
from .metrics import Metrics
from .prefixes import PrefixCache, has_scores, without_scores
from .settings import ApiError

# Tokens of prompts that are read between two steps of the rows. Texts are cut at multiples of it, however busy it is.
PIECE = {"cpu": 512, "cuda": 4096}
# Between two wakes of whoever reads an answer. Handling each token of many fast rows by itself would take longer than
# choosing it: with more rows, each is woken less often, but so that a text still seems to flow.
WAKE_SECONDS, WAKE_SECONDS_PER_ROW, MOST_WAKE_SECONDS = 0.02, 0.001, 0.1
Finish = Literal["stop", "length"]


@dataclass(eq=False)
class Text:
    """A prompt that several answers may follow; it is read once."""

    model_id: str
    model: MambaLM
    tokens: Sequence[int]
    num_cached: int = 0  # tokens that the prefix cache knew
    memory: Memory | None = None  # of what was read
    start: Memory | None = None  # of a saved state that the text goes on from
    is_shared: bool = True  # whether the prefix cache may know it

    @property
    def is_read(self) -> bool:
        return self.memory is not None and len(self.memory.tokens) == len(self.tokens) and has_scores(self.memory)

    def piece(self, size: int) -> Sequence[int]:
        """What is read next."""
        start = len(self.memory.tokens) if self.memory else 0
        return self.tokens[start : (start // size + 1) * size]


@dataclass(eq=False)
class Answer:
    """Tokens that follow a text. The engine adds to `tokens`, and sets `finish` or `error` after the last one."""

    text: Text
    choice: Choice
    max_new_tokens: int  # 0: the text is read, and nothing more
    end_tokens: frozenset[int]
    deadline: float  # by time.monotonic()
    wake: Callable[[], None]  # has whoever waits look again; called in the waiting thread
    wakes_each: bool  # at every token, not only at the end
    tokens: list[Token] = field(default_factory=list)
    finish: Finish | None = None
    error: ApiError | None = None
    is_cancelled: bool = False  # set by whoever waits: nobody wants it any more
    is_enough: bool = False  # set by whoever waits: it has all that was asked for
    began: float = field(default_factory=time.monotonic)
    last_woken: float = -math.inf
    first_after: float | None = None  # seconds from the arrival to the first token

    @property
    def is_done(self) -> bool:
        return self.finish is not None or self.error is not None

    def is_over(self, now: float) -> bool:
        """Whether nothing more is to be generated, though it is not complete."""
        return self.is_cancelled or self.is_enough or now > self.deadline


class _Batch:
    """The rows of one model."""

    def __init__(self, model_id: str, model: MambaLM, capacity: int) -> None:
        self.model_id, self.decoder = model_id, Decoder(model, capacity)
        self.piece = PIECE.get(model.device.type, 512)
        self.reading: list[Text] = []
        self.pending: list[Answer] = []  # have a place; their text is being read
        self.rows: dict[int, Answer] = {}
        self.like: State | None = None  # what reading gives

    def __len__(self) -> int:
        return len(self.pending) + len(self.rows)


class Engine:
    """`wake_all` has functions called in the thread of those who wait."""

    def __init__(
        self, max_concurrent: int, max_queue: int, cache_bytes: int, metrics: Metrics,
        wake_all: Callable[[list[Callable[[], None]]], None],
    ) -> None:  # fmt: skip
        self.max_concurrent, self.max_queue = max_concurrent, max_queue
        self.metrics, self.prefixes = metrics, PrefixCache(cache_bytes)
        self._wake_all = wake_all
        self._changed = threading.Condition()
        self._waiting: deque[Answer] = deque()
        self._forgotten: list[str] = []
        self._is_stopping = False
        self._batches: dict[str, _Batch] = {}
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        return sum(map(len, list(self._batches.values())))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, answers: Sequence[Answer]) -> None:
        """Have answers generated. All that are asked for together wait together."""
        with self._changed:
            if self._is_stopping or not self.is_alive:
                raise ApiError(503, "the server is stopping; ask another one, or again later", code="stopping")
            has_room = self.num_running + len(self._waiting) + len(answers) <= self.max_concurrent
            if len(self._waiting) >= self.max_queue and not has_room:
                raise ApiError(
                    429, f"{len(self._waiting)} answers wait already, as many as --max-queue allows; try again later",
                    code="queue_full",
                )  # fmt: skip
            self._waiting.extend(answers)
            self._changed.notify()

    def forget(self, model_id: str) -> None:
        """Free the memory that a model's rows had. It must have no rows."""
        with self._changed:
            self._forgotten.append(model_id)
            self._changed.notify()

    def stop(self) -> None:
        """End the thread; what is under way gets an error."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self.num_running or self._forgotten or self._is_stopping):
                    self._changed.wait()
                if self._is_stopping:
                    break
                forgotten, self._forgotten = self._forgotten, []
            for model_id in forgotten:
                self._batches.pop(model_id, None)
                self.prefixes.forget(model_id)
            self._woken: list[Callable[[], None]] = []
            self._admit()
            for batch in [batch for batch in self._batches.values() if len(batch)]:
                try:
                    self._advance(batch)
                except Exception as error:
                    self._fail(batch, error)
            if self._woken:
                self._wake_all(self._woken)
        self._woken = []
        left = [*self._waiting, *(answer for b in self._batches.values() for answer in (*b.pending, *b.rows.values()))]
        for answer in left:
            self._end(answer, error=ApiError(503, "the server has stopped", code="stopping"))
        with contextlib.suppress(RuntimeError):  # a loop that has ended has nobody who waits
            self._wake_all(self._woken)

    def _admit(self) -> None:
        """Give places to those who wait, in their order."""
        now = time.monotonic()
        with self._changed:
            late = [answer for answer in self._waiting if answer.is_over(now)]
            for answer in late:
                self._waiting.remove(answer)
        for answer in late:
            error = ApiError(503, "the time of the request (--timeout) ended while it waited; try again later")
            self._end(answer, error=error)
        while self._waiting and self.num_running < self.max_concurrent:
            answer = self._waiting[0]
            try:
                self._place(answer)  # before it leaves the queue, so that it is always counted
            except Exception as error:  # there is no memory for a batch
                self._end(answer, error=_told(error))
            self._waiting.popleft()

    def _place(self, answer: Answer) -> None:
        text = answer.text
        if text.model_id not in self._batches:
            self._batches[text.model_id] = _Batch(text.model_id, text.model, self.max_concurrent)
        batch = self._batches[text.model_id]
        if not text.is_read and text not in batch.reading:
            self._begin(batch, text)
            if answer.max_new_tokens:
                self.metrics.add("prompt_tokens", len(text.tokens))
                self.metrics.add("cached_prompt_tokens", text.num_cached)
        batch.pending.append(answer)

    def _begin(self, batch: _Batch, text: Text) -> None:
        if text.is_shared and self.prefixes.max_bytes:
            text.memory = self.prefixes.longest(text.model_id, text.tokens)
            self.metrics.add("prefix_cache_misses" if text.memory is None else "prefix_cache_hits")
            text.num_cached = len(text.memory.tokens) if text.memory else 0
        if not text.is_read:
            batch.reading.append(text)

    def _advance(self, batch: _Batch) -> None:
        """Read a piece of what is to be read, and choose a token for every row."""
        now = time.monotonic()
        for answer in [answer for answer in batch.pending if answer.is_over(now)]:
            batch.pending.remove(answer)
            self._end(answer, finish="length")
        needed = {answer.text for answer in batch.pending}
        batch.reading = [text for text in batch.reading if text in needed]
        self._read(batch)
        ready = [answer for answer in batch.pending if answer.text.is_read]
        batch.pending = [answer for answer in batch.pending if not answer.text.is_read]
        for answer in [answer for answer in ready if answer.max_new_tokens == 0]:
            ready.remove(answer)
            self._end(answer, finish="length")
        if ready:
            new = {next(self._numbers): answer for answer in ready}
            memories = {row: answer.text.memory for row, answer in new.items()}
            batch.rows |= new
            batch.decoder.add({r: (memory, new[r].choice) for r, memory in memories.items() if memory is not None})
        if batch.rows:
            self._take(batch, batch.decoder.step())

    def _read(self, batch: _Batch) -> None:
        """Of texts in their order, together at most a piece, and at least one of them."""
        now: list[Text] = []
        size = 0
        for text in batch.reading:
            length = len(text.piece(batch.piece))
            if now and size + length > batch.piece:
                break
            now.append(text)
            size += length
        if not now:
            return
        pieces = [text.piece(batch.piece) for text in now]
        for text, memory in zip(now, batch.decoder.read(pieces, [text.memory for text in now]), strict=True):
            text.memory, batch.like = memory, memory.state
            if text.is_read and text.is_shared:
                self.prefixes.put(text.model_id, memory)
        batch.reading = [text for text in batch.reading if not text.is_read]

    def _take(self, batch: _Batch, chosen: dict[int, Token]) -> None:
        """Hand new tokens over, and end the rows that are complete."""
        now = time.monotonic()
        ended: list[int] = []
        num_new = 0
        rest = min(max(WAKE_SECONDS, WAKE_SECONDS_PER_ROW * len(batch.rows)), MOST_WAKE_SECONDS)
        for row, token in chosen.items():
            answer = batch.rows[row]
            if answer.is_cancelled or answer.is_enough:
                continue
            if token.token in answer.end_tokens:
                ended.append(row)
                self._keep(batch, row)
                self._end(answer, finish="stop")
                continue
            if answer.first_after is None:
                answer.first_after = now - answer.began
                self.metrics.observe("time_to_first_token_seconds", answer.first_after)
            answer.tokens.append(token)
            num_new += 1
            if len(answer.tokens) >= answer.max_new_tokens:
                ended.append(row)
                self._keep(batch, row)
                self._end(answer, finish="length")
            elif answer.wakes_each and now - answer.last_woken >= rest:
                answer.last_woken = now
                self._woken.append(answer.wake)
        for row, answer in batch.rows.items():
            if not answer.is_done and answer.is_over(now):
                ended.append(row)
                self._end(answer, finish="length")
        if num_new:
            self.metrics.add("generated_tokens", num_new)
        batch.decoder.drop(ended)
        for row in ended:
            del batch.rows[row]

    def _keep(self, batch: _Batch, row: int) -> None:
        """Remember a row after its answer, for a prompt that goes on from there."""
        answer = batch.rows[row]
        if not self.prefixes.max_bytes or batch.like is None or not answer.text.is_shared:
            return
        saved = batch.decoder.save(row)
        num_inside = saved.count - 1  # chosen tokens that the state has; the last one is not yet part of it
        if 0 < num_inside <= len(answer.tokens):
            tokens = [*answer.text.tokens, *(token.token for token in answer.tokens[:num_inside])]
            self.prefixes.put(batch.model_id, without_scores(saved.state, tokens, batch.like))

    def _end(self, answer: Answer, finish: Finish | None = None, error: ApiError | None = None) -> None:
        if answer.is_cancelled:
            self.metrics.add("cancelled_sequences")
        elif error is not None:
            self.metrics.add("failed_sequences")
        answer.error = error
        answer.finish = finish
        self._woken.append(answer.wake)

    def _fail(self, batch: _Batch, error: Exception) -> None:
        """A batch that cannot go on: its answers get the error, and the next ones a new decoder."""
        told = _told(error)
        for answer in (*batch.pending, *batch.rows.values()):
            if not answer.is_done:
                self._end(answer, error=told)
        del self._batches[batch.model_id]


def _told(error: Exception) -> ApiError:
    """What clients get to know of a fault. The server's own terminal has all of it."""
    is_known = isinstance(error, UserError)
    if not is_known:
        say("".join(traceback.format_exception(error)))
    message = str(error) if is_known else f"the server failed: {type(error).__name__}: {error}"
    return ApiError(500, message, code="engine_failed")
