"""Between text and tokens: where a prompt ends, and what new tokens add to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..files import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """A text to continue. The first new token is one of `first_tokens` where there are any.

    A space at the end of a prompt is a token of its own, but in training text it is part of the word that follows. So
    it is removed from the prompt, and the first new token must begin with it.
    """

    tokens: list[int]
    first_tokens: list[int]
    space: list[int]  # what was removed

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, text: str, end_tokens: Sequence[int], vocab_size: int, *, goes_on: bool = False
    ) -> Prompt:
        """An empty text starts from the first end token. One that goes on from another has no token of a beginning."""
        tokens = _encode(tokenizer, text, end_tokens, goes_on)
        if allowed := _words_after_space(tokenizer, tokens):
            return cls(tokens[:-1], [token for token in allowed if token < vocab_size], tokens[-1:])
        return cls(tokens, [], [])


class NewText:
    """One row's new text: what later tokens cannot change, up to the first stop string.

    Tokens cannot be decoded one by one: a character's bytes may come in several tokens, and a space may depend on the
    text before. So each piece is decoded together with the one before it, the first one with the prompt. The library's
    DecodeStream does not give what it still holds at the end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, stop_strings: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop_strings = tokenizer, stop_strings
        self.held = ""  # decoded, but perhaps the beginning of a stop string
        self.is_stopped = False
        self._look_back_on([*prompt.tokens, *prompt.space])
        if prompt.space:  # with which the first new token begins
            self.tokens.pop()
            self.num_old -= 1

    def add(self, *tokens: int) -> str:
        """What one token adds; or several at once, which is quicker, but does not say which one brought the stop."""
        return self._until_stop(self._decode(tokens))

    def finish(self) -> str:
        """All that is still held, when no token follows."""
        text = self._until_stop(self.text[self.num_given :])
        return text if self.is_stopped else text + self.held

    def _look_back_on(self, tokens: list[int]) -> None:
        self.tokens, self.num_old = list(tokens), len(tokens)
        self.text = self.tokenizer.decode(self.tokens)
        self.num_given = len(self.text)  # characters of it

    def _decode(self, new_tokens: Sequence[int]) -> str:
        self.tokens += new_tokens
        before, self.text = self.text, self.tokenizer.decode(self.tokens)
        adds_nothing = self.text == before  # a special token
        # Bytes of their own, like <0x0A>, are decoded together: the next one may change this one's text.
        is_byte = re.fullmatch("<0x[0-9A-F]{2}>", self.tokenizer.id_to_token(self.tokens[-1]) or "")
        if adds_nothing or self.text.endswith("\ufffd") or is_byte:
            return ""
        new = self.text[self.num_given :]
        self._look_back_on(self.tokens[self.num_old :])
        return new

    def _until_stop(self, new: str) -> str:
        text = self.held + new
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in self.stop_strings if stop in text]
        if ends:
            self.is_stopped = True
            return text[: min(ends)[1]]  # the first that is complete, so that token borders do not matter
        longest = min(len(text), max(map(len, self.stop_strings), default=1) - 1)
        begins = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self.stop_strings))
        num_sure = len(text) - next(begins, 0)
        self.held = text[num_sure:]
        return text[:num_sure]


def whole_texts(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer; or a copy without truncation and padding, where its file has them."""
    if tokenizer.truncation is None and tokenizer.padding is None:
        return tokenizer
    whole = type(tokenizer).from_str(tokenizer.to_str())
    whole.encode_special_tokens = tokenizer.encode_special_tokens  # which is not part of the file
    whole.no_truncation()
    whole.no_padding()
    return whole


def _words_after_space(tokenizer: Tokenizer, prompt: list[int]) -> list[int]:
    """Tokens that begin with the prompt's last one, where that is white space; none where there is only itself."""
    if len(prompt) < 2 or not tokenizer.decode(prompt[-1:]).isspace():
        return []
    space = str(tokenizer.id_to_token(prompt[-1]))
    found = [number for token, number in tokenizer.get_vocab().items() if token.startswith(space)]
    return sorted(found) if len(found) > 1 else []


def _encode(tokenizer: Tokenizer, prompt: str, end_tokens: Sequence[int], goes_on: bool) -> list[int]:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"the prompt {prompt!r} is not UTF-8; give it in UTF-8, as the terminal should be") from None
    tokens = tokenizer.encode(prompt, add_special_tokens=not goes_on).ids
    tokens = tokens or (list(end_tokens[:1]) if prompt == "" else [])
    if not tokens:
        raise UserError(
            f"the prompt {prompt!r} has no token to start from; give text that the tokenizer knows, "
            "or, for an empty prompt, end_tokens"
        )
    return tokens
