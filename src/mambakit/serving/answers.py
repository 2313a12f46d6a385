"""From tokens to what clients get: text in pieces, log probabilities, and OpenAI's objects."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from ..decoding import NewText, Prompt, Token
from .engine import Answer


@dataclass(frozen=True)
class Scored:
    """A token of an answer, and where its text begins in it."""

    token: Token
    offset: int


@dataclass(frozen=True)
class Piece:
    """What is new of one answer."""

    index: int
    text: str
    scored: Sequence[Scored]
    finish: str | None


class Reader:
    """One answer's text, of the tokens that the engine adds to it."""

    def __init__(self, index: int, answer: Answer, tokenizer: Tokenizer, prompt: Prompt, stops: Sequence[str]) -> None:
        self.index, self.answer = index, answer
        self.finish: str | None = None
        self.num_tokens = 0
        self._text = NewText(tokenizer, prompt, stops)
        self._one_by_one = bool(stops) or answer.choice.logprobs is not None
        self._num_chars = 0  # given
        self._scored: list[Scored] = []  # whose text is not given yet

    def read(self) -> Piece | None:
        """What has come since; None where that is nothing that can be shown yet."""
        if self.finish is not None:
            return None
        ended = self.answer.finish  # before the tokens: the last ones are there when it is set
        if self.answer.error is not None:
            raise self.answer.error
        new, text = self.answer.tokens[self.num_tokens :], ""
        if self._one_by_one:
            for token in new:
                self._scored.append(Scored(token, self._num_chars + len(text) + len(self._text.held)))
                self.num_tokens += 1
                text += self._text.add(token.token)
                if self._text.is_stopped:
                    break
        elif new:
            self.num_tokens += len(new)
            text = self._text.add(*(token.token for token in new))
        if ended is not None and not self._text.is_stopped:
            text += self._text.finish()
        if self._text.is_stopped:
            self.finish, self.answer.is_enough = "stop", True
        else:
            self.finish = ended
        self._num_chars += len(text)
        is_whole = self.finish is not None and not self._text.is_stopped
        scored = [each for each in self._scored if is_whole or each.offset < self._num_chars]
        self._scored = self._scored[len(scored) :]
        return Piece(self.index, text, scored, self.finish) if text or scored or self.finish else None


class Listener:
    """Pieces of several answers, as they come."""

    def __init__(self) -> None:
        self.readers: list[Reader] = []
        self._is_new = asyncio.Event()

    def wake(self) -> None:
        self._is_new.set()

    async def pieces(self) -> AsyncIterator[Piece]:
        while any(reader.finish is None for reader in self.readers):
            await self._is_new.wait()
            self._is_new.clear()
            for reader in self.readers:
                if (piece := reader.read()) is not None:
                    yield piece

    async def ended(self, answer: Answer) -> None:
        """Until an answer that nobody reads is complete."""
        while not answer.is_done:
            await self._is_new.wait()
            self._is_new.clear()
        if answer.error is not None:
            raise answer.error

    def cancel(self) -> None:
        """End what is still under way."""
        for reader in self.readers:
            if not reader.answer.is_done and not reader.answer.is_enough:
                reader.answer.is_cancelled = True

    def usage(self) -> dict[str, Any]:
        texts = {id(reader.answer.text): reader.answer.text for reader in self.readers}.values()
        prompt = sum(len(text.tokens) for text in texts)
        generated = sum(reader.num_tokens for reader in self.readers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(text.num_cached for text in texts)},
        }


class Form:
    """The objects of one request's answer. `num_likeliest`: log probabilities of so many tokens, or of none."""

    def __init__(self, is_chat: bool, model: str, tokenizer: Tokenizer, num_likeliest: int | None) -> None:
        self.is_chat, self.tokenizer, self.num_likeliest = is_chat, tokenizer, num_likeliest
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": name, "created": int(time.time()), "model": model}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": piece.index, "logprobs": self._logprobs(piece.scored)}
        if self.is_chat:
            choice["delta"] = {"content": piece.text} if piece.text else {}
        else:
            choice["text"] = piece.text
        return self._chunk([{**choice, "finish_reason": piece.finish}])

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat's answer."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def closing(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion.chunk" if self.is_chat else "text_completion",
            "choices": choices,
        }

    def whole(self, pieces: Sequence[Piece], num_answers: int, usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for index in range(num_answers):
            own = [piece for piece in pieces if piece.index == index]
            text = "".join(piece.text for piece in own)
            content = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
            logprobs = self._logprobs([scored for piece in own for scored in piece.scored])
            choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": own[-1].finish})
        name = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head, "object": name, "choices": choices, "usage": usage}

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if self.num_likeliest is None:
            return None
        if self.is_chat:
            return {"content": [self._entry(each.token) for each in scored]}
        likeliest = [
            {self._name(token): value for token, value in reversed(each.token.likeliest)} for each in scored
        ]  # of two tokens of one text, the likelier
        return {
            "tokens": [self._name(each.token.token) for each in scored],
            "token_logprobs": [each.token.logprob for each in scored],
            "top_logprobs": likeliest if self.num_likeliest else None,
            "text_offset": [each.offset for each in scored],
        }

    def _entry(self, token: Token) -> dict[str, Any]:
        assert token.logprob is not None
        return {
            **self._named(token.token, token.logprob),
            "top_logprobs": [self._named(rival, value) for rival, value in token.likeliest],
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        name = self.tokenizer.decode([token], skip_special_tokens=False)
        is_text = "\ufffd" not in name
        return {
            "token": name if is_text else self._name(token),
            "logprob": logprob,
            "bytes": list(name.encode()) if is_text else None,
        }

    def _name(self, token: int) -> str:
        """A token's text; of part of a character, its name in the vocabulary."""
        text = self.tokenizer.decode([token], skip_special_tokens=False)
        return str(self.tokenizer.id_to_token(token)) if "\ufffd" in text else text
