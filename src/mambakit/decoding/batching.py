"""Many prompts, of which a fixed number are continued at a time: where a row ends, the next prompt begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..files import UserError
from ..model import MambaLM
from .decoder import Decoder
from .generate import check_options, row_seed
from .sampling import Choice, Sampling
from .text import NewText, Prompt, whole_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FinishReason = Literal["stop", "length"]  # an end token or a stop string; max_new_tokens


@dataclass(frozen=True)
class Continuation:
    """The text that follows a prompt."""

    row: int  # the number of the prompt
    text: str
    prompt_tokens: int
    tokens: int  # new ones, without an end token
    finish_reason: FinishReason


def continue_texts(
    model: MambaLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    batch_size: int = 32,
    end_tokens: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    max_new_tokens: int = 100,
    seed: int | None = None,
    **sampling: Any,
) -> Iterator[Continuation]:
    """The text that follows each prompt, in the order in which they end. What a prompt gives depends on its text, its
    number and the seed, not on `batch_size`. Options as for `generate_text`."""
    tokenizer = whole_texts(tokenizer)
    settings = Sampling(**sampling)
    check_options(settings, seed, max_new_tokens, stop_strings)
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size}: need at least 1")
    waiting = [Prompt.of(tokenizer, prompt, end_tokens, model.config.vocab_size) for prompt in prompts]
    ends = frozenset(end_tokens)

    def results() -> Iterator[Continuation]:
        decoder = Decoder(model, min(batch_size, len(waiting)))
        running: dict[int, _Row] = {}
        following = 0
        while running or following < len(waiting):
            new = range(following, min(len(waiting), following + batch_size - len(running)))
            following = new.stop
            if max_new_tokens == 0:
                yield from (Continuation(row, "", len(waiting[row].tokens), 0, "length") for row in new)
                continue
            memories = decoder.read([waiting[row].tokens for row in new])
            choices = [Choice(settings, row_seed(seed, row), waiting[row].first_tokens) for row in new]
            decoder.add(dict(zip(new, zip(memories, choices, strict=True), strict=True)))
            running |= {row: _Row(NewText(tokenizer, waiting[row], stop_strings)) for row in new}
            ended: dict[int, FinishReason] = {}
            while not ended:
                for row, token in decoder.step().items():
                    if (reason := running[row].add(token.token, ends, max_new_tokens)) is not None:
                        ended[row] = reason
            decoder.drop(ended)
            for row, reason in ended.items():
                done = running.pop(row)
                yield Continuation(row, "".join(done.pieces), len(waiting[row].tokens), done.count, reason)

    return results()


class _Row:
    def __init__(self, text: NewText) -> None:
        self.text, self.pieces, self.count = text, list[str](), 0

    def add(self, token: int, ends: frozenset[int], max_new_tokens: int) -> FinishReason | None:
        """Why the row ends with this token."""
        if token in ends:
            self.pieces.append(self.text.finish())
            return "stop"
        self.count += 1
        self.pieces.append(self.text.add(token))
        if not self.text.is_stopped and self.count == max_new_tokens:
            self.pieces.append(self.text.finish())
            return "stop" if self.text.is_stopped else "length"
        return "stop" if self.text.is_stopped else None
