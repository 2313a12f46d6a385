"""Rows of text that are continued together: prompts are read by the kernels of training, then a token at a time.

`read` gives what a model knows after a text; `add` begins a row from it; `step` chooses a token for every row; `drop`
ends rows; `fork`, `save` and `restore` copy one. The memory of all rows is one block, in which the rows that go on are
the first ones: a row that ends leaves its place to the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..files import UserError
from ..model import MambaLM, State
from .sampling import Choice, Chosen, Needs, Settings, choose
from .stepping import Stepper, make_reader, make_stepper

READ_AT_ONCE = {"cpu": 2048, "cuda": 16384}  # tokens: a prompt is read in pieces, so that memory does not grow with it
Row = int  # a name that the caller gives


@dataclass(frozen=True)
class Memory:
    """What a model knows after a text."""

    state: State  # of one row
    logits: Tensor  # (1, V): scores of the next token
    tokens: Sequence[int] = ()  # the text


@dataclass(frozen=True)
class Saved:
    """A row between two tokens: `token` was chosen and is not yet part of the state."""

    state: State
    token: int
    choice: Choice
    count: int  # tokens that were chosen
    seen: Tensor  # (V)
    tokens: Sequence[int] = ()  # the text with `token`, where the caller keeps it


@dataclass(frozen=True)
class Token:
    """A token that was chosen, and, where its row asks for them, log probabilities."""

    token: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


class Decoder:
    def __init__(self, model: MambaLM, capacity: int = 1, *, run_ahead: bool = True) -> None:
        """With `run_ahead`, a GPU computes a step while the tokens of the one before are read: a row that is saved may
        have one token more than `step` has given."""
        self.model, self.device = model, model.device
        if self.device.type == "xla":  # which would compile each token
            raise UserError("text is not generated on xla; choose another device, for example cpu")
        self._runs_ahead = run_ahead and self.device.type == "cuda"
        self.rows: list[Row] = []
        self._choices: list[Choice] = []
        self._waiting: deque[_Round] = deque()  # chosen, and not read by the caller
        self._capacity = capacity  # rows that there is memory for, from the first row on
        self._stepper: Stepper | None = None
        self._reader = make_reader(model)
        self._settings = Settings.empty(capacity, model.config.vocab_size, self.device)

    @torch.inference_mode()
    def read(self, texts: Sequence[Sequence[int]], after: Sequence[Memory | None] = ()) -> list[Memory]:
        """What the model knows after each text, or after a memory and the text; texts of like length at once."""
        before = list(after) or [None] * len(texts)
        found: dict[int, Memory] = {}
        for group in self._groups(texts, before):
            states = [memory.state for i in group if (memory := before[i]) is not None]
            start = State.join(states) if states else None
            state, logits = self._read_together([texts[i] for i in group], start)
            for i, own, scores in zip(group, state.apart(), logits.split(1), strict=True):
                known = before[i]
                tokens = [*(known.tokens if known else ()), *texts[i]]
                found[i] = Memory(own, scores.clone(), tokens)
        return [found[i] for i in range(len(texts))]

    @torch.inference_mode()
    def add(self, rows: Mapping[Row, tuple[Memory, Choice]]) -> None:
        """Begin rows. Their first tokens come with a next `step`."""
        if not rows:
            return
        first, vocab_size = len(self.rows), self.model.config.vocab_size
        memories, choices = [memory for memory, _ in rows.values()], [choice for _, choice in rows.values()]
        stepper = self._with_room(first + len(rows), memories[0].state)
        seen = _seen([memory.tokens for memory in memories], vocab_size).to(self.device)
        self._put(stepper, list(rows), [memory.state for memory in memories], choices, [0] * len(rows), seen)
        logits = torch.cat([memory.logits for memory in memories])
        new = Settings(*(tensor[first : len(self.rows)] for tensor in self._settings.tensors()))
        allowed = None
        if any(choice.first_tokens for choice in choices):
            allowed = torch.stack([_allowed(choice, vocab_size) for choice in choices]).to(self.device)
        chosen = choose(logits, new, Needs.of(choices), allowed)
        stepper.tokens[first : len(self.rows)] = chosen.tokens
        self._waiting.append(_Round(self.rows[first:], choices, chosen))

    @torch.inference_mode()
    def step(self) -> dict[Row, Token]:
        """A token of each row that has one: of new rows the first, else the next of all. On a GPU one more step is
        under way when this returns."""
        if self.rows and self._stepper and (self._runs_ahead or not self._waiting):
            chosen = self._stepper.step(len(self.rows), self._settings, Needs.of(self._choices))
            self._waiting.append(_Round(list(self.rows), list(self._choices), chosen))
        if not self._waiting:
            return {}
        oldest = self._waiting.popleft()
        if not oldest.is_finite():
            raise UserError(_why_not_finite(self.model))
        return oldest.read()

    @torch.inference_mode()
    def drop(self, rows: Collection[Row]) -> None:
        """End these rows."""
        ended = {row for row in self.rows if row in rows}
        count = len(self.rows) - len(ended)
        free = [place for place in range(count) if self.rows[place] in ended]
        going_on = [place for place in range(count, len(self.rows)) if self.rows[place] not in ended]
        for place, last in zip(free, going_on, strict=True):
            assert self._stepper is not None
            self.rows[place], self._choices[place] = self.rows[last], self._choices[last]
            for tensor in [*self._stepper.tensors(), *self._settings.tensors()]:
                tensor[place] = tensor[last]
        del self.rows[count:], self._choices[count:]
        for waiting in self._waiting:
            waiting.drop(ended)
        self._waiting = deque(waiting for waiting in self._waiting if waiting.rows)

    @torch.inference_mode()
    def save(self, row: Row) -> Saved:
        """A copy of a row as it is, with all tokens that were chosen so far."""
        assert self._stepper is not None
        i = self.rows.index(row)
        state = self._stepper.state.map(lambda tensor: tensor[i : i + 1].clone())
        count, token = int(self._settings.count[i]), int(self._stepper.tokens[i])
        return Saved(state, token, self._choices[i], count, self._settings.seen[i].clone())

    @torch.inference_mode()
    def restore(self, row: Row, saved: Saved) -> None:
        """Go on with a row that was saved; the token after the saved one comes with a next `step`."""
        place = len(self.rows)
        stepper = self._with_room(place + 1, saved.state)
        self._put(stepper, [row], [saved.state], [saved.choice], [saved.count], saved.seen[None].to(self.device))
        stepper.tokens[place] = saved.token

    def fork(self, row: Row, new: Row, seed: int | None = None) -> None:
        """A second row that goes on from where the first is: by the same choices, or by those of another seed. Tokens
        that were chosen and not yet given are those of both."""
        saved = self.save(row)
        choice = saved.choice if seed is None else replace(saved.choice, seed=seed)
        self.restore(new, replace(saved, choice=choice))
        for waiting in self._waiting:
            waiting.fork(row, new)

    def _put(
        self, stepper: Stepper, rows: list[Row], states: list[State], choices: list[Choice], counts: list[int],
        seen: Tensor,
    ) -> None:  # fmt: skip
        """After the rows that there are."""
        for row in rows:
            if row in self.rows:
                raise ValueError(f"the decoder has a row {row!r} already; drop it first, or take another name")
        first = len(self.rows)
        stepper.put(first, states)
        self._settings.put(first, choices, counts, seen)
        self.rows += rows
        self._choices += choices

    def _with_room(self, rows: int, like: State) -> Stepper:
        """The stepper, with room for so many rows; the first state says of what shapes and dtypes they are."""
        if self._stepper is None:
            self._stepper = make_stepper(self.model, like, self._capacity)
        if rows > self._capacity:
            self._capacity = 1 << (rows - 1).bit_length()
            before = [*self._stepper.tensors(), *self._settings.tensors()]
            self._stepper = make_stepper(self.model, like, self._capacity)
            self._settings = Settings.empty(self._capacity, self.model.config.vocab_size, self.device)
            for old, new in zip(before, [*self._stepper.tensors(), *self._settings.tensors()], strict=True):
                new[: len(old)] = old
        return self._stepper

    def _groups(self, texts: Sequence[Sequence[int]], before: Sequence[Memory | None]) -> Iterator[list[int]]:
        """Texts that are read together. Shorter ones are filled up in front, at most to twice their length; not where
        a memory comes first, nor by a model without doc_ids, which reads what follows a memory one by one."""
        longest_first = sorted(range(len(texts)), key=lambda i: (before[i] is None, -len(texts[i])))
        group: list[int] = []
        for i in longest_first:
            if group:
                longest, has_memory = len(texts[group[0]]), before[group[0]] is not None
                is_filled_up = self.model.takes_doc_ids and not has_memory
                like = 2 * len(texts[i]) >= longest if is_filled_up else len(texts[i]) == longest
                fits = (len(group) + 1) * longest <= READ_AT_ONCE.get(self.device.type, 2048)
                fits = fits and (self.model.takes_doc_ids or not has_memory)
                if not like or not fits or has_memory != (before[i] is not None):
                    yield group
                    group = []
            group.append(i)
        if group:
            yield group

    def _read_together(self, texts: Sequence[Sequence[int]], state: State | None) -> tuple[State, Tensor]:
        """(the state of all rows, logits (B, V)). What fills up a row is a document of its own before the text."""
        length = max(len(text) for text in texts)
        reader = self._reader if state is None else None
        rounded = reader.length(len(texts), length) if reader else None
        length = rounded or length
        starts = torch.tensor([length - len(text) for text in texts])
        tokens = torch.tensor([[0] * (length - len(text)) + list(text) for text in texts])
        documents = (torch.arange(length) >= starts[:, None]).int()
        if reader and rounded:
            logits, state = reader(tokens, documents)
            return state, logits
        tokens = tokens.to(self.device)
        doc_ids = documents.to(self.device) if bool(starts.any()) else None
        width = max(1, READ_AT_ONCE.get(self.device.type, 2048) // len(texts))
        for first in range(0, length, width):
            piece = slice(first, first + width)
            if state is not None and doc_ids is not None:
                state = state.keep((starts < first).to(self.device))
            logits, state = self.model.next_scores(
                tokens[:, piece], doc_ids[:, piece] if doc_ids is not None else None, state
            )
        assert state is not None
        return state, logits


class _Round:
    """Tokens that were chosen for some rows; on a GPU they are on their way."""

    def __init__(self, rows: list[Row], choices: list[Choice], chosen: Chosen) -> None:
        self.rows = {row: (place, choice) for place, (row, choice) in enumerate(zip(rows, choices, strict=True))}
        on_gpu = chosen.tokens.device.type == "cuda"
        tensors = (chosen.tokens, chosen.is_finite, chosen.logprobs, chosen.likeliest, chosen.likeliest_logprobs)
        self._tensors = [None if tensor is None else tensor.to("cpu", non_blocking=on_gpu) for tensor in tensors]
        self._arrived = torch.cuda.Event() if on_gpu else None
        if self._arrived is not None:
            self._arrived.record()

    def drop(self, rows: Collection[Row]) -> None:
        self.rows = {row: at for row, at in self.rows.items() if row not in rows}

    def fork(self, row: Row, new: Row) -> None:
        if row in self.rows:
            self.rows[new] = self.rows[row]

    def is_finite(self) -> bool:
        if self._arrived is not None:
            self._arrived.synchronize()
        assert self._tensors[1] is not None
        finite = self._tensors[1].tolist()
        return all(finite[place] for place, _ in self.rows.values())

    def read(self) -> dict[Row, Token]:
        tokens, _, logprobs, likeliest, values = ([] if t is None else t.tolist() for t in self._tensors)
        found: dict[Row, Token] = {}
        for row, (i, choice) in self.rows.items():
            if choice.logprobs is None:
                found[row] = Token(tokens[i])
            else:
                rivals = tuple(zip(likeliest[i], values[i], strict=True))[: choice.logprobs]
                found[row] = Token(tokens[i], logprobs[i], rivals)
        return found


def _seen(texts: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """Which tokens are in each text (B, V)."""
    seen = torch.zeros(len(texts), vocab_size, dtype=torch.bool)
    for row, text in zip(seen, texts, strict=True):
        row[[token for token in set(text) if token < vocab_size]] = True
    return seen


def _allowed(choice: Choice, vocab_size: int) -> Tensor:
    if not choice.first_tokens:
        return torch.ones(vocab_size, dtype=torch.bool)
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, torch.tensor(choice.first_tokens), True)


def _why_not_finite(model: MambaLM) -> str:
    """Of scores that are not finite, from which a token could still be chosen."""
    broken = [name for name, weight in model.named_parameters() if not torch.isfinite(weight).all()]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        return (
            f"the weights of this model are not finite (NaN or infinity in {broken[0]}{more}); "
            "no text can be generated from it: take an earlier checkpoint"
        )
    weight = model.lm_head.weight.dtype
    advice = "load it in another dtype: load(path, dtype=torch.float32)"
    if weight == torch.float32:
        advice = "it may be damaged; take another copy, or an earlier checkpoint"
    dtype = str(weight).removeprefix("torch.")
    return f"the model's scores of the next token are not finite in {dtype}, though its weights are; {advice}"
