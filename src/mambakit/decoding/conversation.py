"""One text that a person and a model write in turns: the model reads only what is new."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..files import UserError
from ..model import MambaLM
from .batching import FinishReason
from .decoder import Decoder, Memory, Saved
from .generate import check_options, row_seed
from .sampling import Choice, Sampling
from .saving import read_row, write_row
from .text import NewText, Prompt, whole_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LOOK_BACK = 64  # tokens that the text of new ones may depend on


@dataclass
class Turn:
    """What the model has read and written since the person's last text."""

    num_read: int = 0
    read_seconds: float = 0.0
    num_new: int = 0  # without an end token
    new_seconds: float = 0.0  # from the first new token to the last
    finish_reason: FinishReason | None = None  # None: it was stopped

    @property
    def tokens_per_second(self) -> float | None:
        return (self.num_new - 1) / self.new_seconds if self.num_new > 1 and self.new_seconds > 0 else None


class Conversation:
    def __init__(self, model: MambaLM, tokenizer: Tokenizer, end_tokens: Sequence[int], **settings: Any) -> None:
        """Settings are those of `Sampling`, and max_new_tokens, stop_strings and seed."""
        self.model, self.tokenizer, self.end_tokens = model, whole_texts(tokenizer), tuple(end_tokens)
        self.sampling, self.max_new_tokens, self.stop_strings = Sampling(), 100, list[str]()
        self.seed: int | None = None
        self.turn = Turn()
        self._decoder = Decoder(model, run_ahead=False)  # so that a row is saved as it was shown
        self._saved: Saved | None = None  # after the last turn
        self._turns = self._row = 0
        self.change(**settings)

    def change(self, **settings: Any) -> None:
        """Change settings for what follows. A text that goes on takes a new seed too."""
        seed = settings.get("seed")
        own: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "stop_strings": self.stop_strings,
            "seed": self.seed,
        }
        own |= {name: settings.pop(name) for name in own if name in settings}
        sampling = replace(self.sampling, **settings)
        check_options(sampling, own["seed"], own["max_new_tokens"], own["stop_strings"])
        self.sampling, self.max_new_tokens = sampling, own["max_new_tokens"]
        self.stop_strings, self.seed = list(own["stop_strings"]), own["seed"]
        if self._saved is not None and seed is not None:
            self._saved = replace(self._saved, choice=replace(self._saved.choice, seed=seed))

    @property
    def has_begun(self) -> bool:
        return self._saved is not None

    @property
    def has_ended(self) -> bool:
        """Whether the model's last token ends a text; a next one follows the text before it."""
        return self._saved is not None and self._saved.token in self.end_tokens

    def reset(self) -> None:
        self._saved, self._turns, self.turn = None, 0, Turn()

    def answer(self, text: str | None = None, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Pieces of what follows a text that is put after all before; without one the model goes on by itself, with
        the tokens that it would have chosen. The text is read when this is called, the tokens come with the pieces.
        `is_stopped` is asked before each token. What was read and written is kept, also where the caller takes no more
        pieces; an error, or an interrupt, leaves everything as it was. With max_new_tokens=0 a text is only read."""
        self._decoder.drop(self._decoder.rows)
        begin, self._row, turn = time.perf_counter(), self._row + 1, Turn()
        pieces: Iterator[str] = iter(())
        if text is None or (text == "" and self.has_begun):
            pieces = self._steps(*self._go_on(), turn, is_stopped)
        elif self.max_new_tokens == 0:
            turn.num_read = self._read_only(text)
        else:
            known, new_text, turn.num_read = self._begin(text)
            pieces = self._steps(known, new_text, turn, is_stopped)
        turn.read_seconds = time.perf_counter() - begin
        self.turn = turn
        return pieces

    def save(self, path: str | Path) -> None:
        """Put the row to disk, as `write_row` does."""
        if self._saved is None:
            raise UserError("there is nothing to save; begin with a text")
        write_row(path, self._saved, self.model)

    def restore(self, path: str | Path) -> None:
        """Go on from a saved row, by its settings."""
        self._saved = read_row(path, self.model)
        self.sampling = self._saved.choice.sampling

    def _steps(self, known: list[int], new_text: NewText, turn: Turn, is_stopped: Callable[[], bool]) -> Iterator[str]:
        has_failed = False
        try:
            yield from self._pieces(known, new_text, turn, is_stopped)
        except (Exception, KeyboardInterrupt):  # a step may be half done
            has_failed = True
            raise
        finally:
            if not has_failed and (turn.num_new or turn.finish_reason == "stop"):
                self._saved = replace(self._decoder.save(self._row), tokens=known)
                self._turns += 1
            self._decoder.drop({self._row})

    def _known(self) -> list[int]:
        """The text so far, of which a row that others have saved may have only the last token."""
        return [] if self._saved is None else list(self._saved.tokens or [self._saved.token])

    def _prompt(self, text: str) -> Prompt:
        goes_on, vocab_size = self.has_begun, self.model.config.vocab_size
        return Prompt.of(self.tokenizer, text, self.end_tokens, vocab_size, goes_on=goes_on)

    def _unread(self) -> tuple[Memory | None, list[int], list[int]]:
        """(what the model knows, the tokens after that, all tokens), without an end token."""
        known = self._known()
        if self._saved is None:
            return None, [], known
        unread = [] if self.has_ended else known[-1:]
        known = known[:-1] if self.has_ended else known
        return Memory(self._saved.state, torch.empty(0), known[: len(known) - len(unread)]), unread, known

    def _read_only(self, text: str) -> int:
        """Read a text. Its last token takes the place of one that was chosen."""
        prompt, (before, unread, known) = self._prompt(text), self._unread()
        new = [*unread, *prompt.tokens, *prompt.space]
        known = [*known, *prompt.tokens, *prompt.space]
        state = before.state if before is not None else self.model.initial_state(1)
        if len(new) > 1:
            state = self._decoder.read([new[:-1]], [before])[0].state
        seen = torch.zeros(self.model.config.vocab_size, dtype=torch.bool, device=self.model.device)
        seen[[token for token in known if token < len(seen)]] = True
        choice = Choice(self.sampling, row_seed(self.seed, self._turns))
        self._saved, self._turns = Saved(state, new[-1], choice, 0, seen, known), self._turns + 1
        return len(new)

    def _go_on(self) -> tuple[list[int], NewText]:
        """Take the row up again: (all tokens, the new text)."""
        saved, known = self._saved, self._known()
        if saved is None or self.has_ended:
            raise UserError(f"{'the text has ended' if saved else 'there is no text yet'}; give one to go on from")
        seen = saved.seen.clone()
        seen[[token for token in known if token < len(seen)]] = True
        choice = replace(saved.choice, sampling=self.sampling)
        self._decoder.restore(self._row, replace(saved, choice=choice, seen=seen))
        return known, NewText(self.tokenizer, Prompt(known[-LOOK_BACK:], [], []), self.stop_strings)

    def _begin(self, text: str) -> tuple[list[int], NewText, int]:
        """Read a text, and begin a row after it: (all tokens, the new text, how many were read)."""
        prompt, (before, unread, known) = self._prompt(text), self._unread()
        unread = [*unread, *prompt.tokens]
        (memory,) = self._decoder.read([unread], [before])
        seed = row_seed(self.seed, self._turns)
        self._decoder.add({self._row: (memory, Choice(self.sampling, seed, prompt.first_tokens))})
        looked_at = replace(prompt, tokens=[*known[-LOOK_BACK:], *prompt.tokens])
        return [*known, *prompt.tokens], NewText(self.tokenizer, looked_at, self.stop_strings), len(unread)

    def _pieces(self, known: list[int], text: NewText, turn: Turn, is_stopped: Callable[[], bool]) -> Iterator[str]:
        first = 0.0
        while turn.num_new < self.max_new_tokens and not is_stopped():
            token = self._next_token()
            known.append(token)
            if token in self.end_tokens:
                turn.finish_reason = "stop"
                break
            turn.num_new += 1
            now = time.perf_counter()
            first = first or now
            turn.new_seconds = now - first
            if piece := text.add(token):
                yield piece
            if text.is_stopped:
                turn.finish_reason = "stop"
                return
        else:
            turn.finish_reason = "length" if turn.num_new == self.max_new_tokens else None
        if piece := text.finish():
            yield piece

    def _next_token(self) -> int:
        while self._row not in (found := self._decoder.step()):  # the first token of a row that was dropped before it
            pass
        return found[self._row].token
