"""How likely a model finds continuations of texts: the sum of log-probabilities of their tokens, and whether each token
is the likeliest. Tasks with several answers ask this of every answer.

Most requests are packed: one after another in one long row, as documents of training are. Requests that begin alike,
such as the answers to one question, go on from a state: what they share is read once, and each rest is a row that
begins with the state after it. Only tokens that are asked for get logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..device import autocast
from ..model import MambaLM, State
from .scoring import WIDTHS, tokens_at_once

LOGITS_AT_ONCE = 2**24
STATE_BYTES = 2**29  # for states on a CPU; on a GPU an eighth of the free memory
FEWEST_ROWS = 8  # where fewer states fit, all is packed


class Request(NamedTuple):
    """Token ids. A context has at least one, after which the first token of the continuation is predicted."""

    context: Sequence[int]
    continuation: Sequence[int]

    @property
    def inputs(self) -> list[int]:
        return [*self.context, *self.continuation[:-1]]


class Likelihood(NamedTuple):
    log_probability: float
    is_greedy: bool  # whether each token is the likeliest after those before it


class _Asked(NamedTuple):
    """The tokens that are to be predicted from the inputs at `column`, `column` + 1, …"""

    request: int
    column: int
    targets: Sequence[int]


@dataclass
class _Row:
    tokens: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # where documents begin, beside the first
    asked: list[_Asked] = field(default_factory=list)


@dataclass
class _Group:
    """Requests whose first `shared` tokens are the same."""

    shared: int
    requests: list[int]
    num_inputs: int  # of all its requests


class Continuations:
    """A model that is asked for likelihoods."""

    def __init__(self, model: MambaLM, dtype: torch.dtype) -> None:
        self.model, self.dtype = model.eval(), dtype
        self.tokens_at_once = tokens_at_once(model, dtype)
        row_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.initial_state(1).tensors())
        is_cuda = model.device.type == "cuda"
        room = torch.cuda.mem_get_info(model.device)[0] // 8 if is_cuda else STATE_BYTES
        self.state_rows = room // (2 * row_bytes)  # those of what is shared, and as many that go on from them
        # What a row that begins with a state costs more than a packed one, in tokens; measured with 16 and 128 states.
        self.state_tokens = max(8, model.config.state_size // 4)

    @torch.inference_mode()
    def likelihoods(
        self, requests: Sequence[Request], advance: Callable[[int], None] = lambda num_requests: None
    ) -> list[Likelihood]:
        """`advance` is called with the number of requests that are done."""
        sums, greedy = [0.0] * len(requests), [True] * len(requests)
        groups = self._groups(requests)
        advance(len(requests) - sum(len(group.requests) for group in groups))
        alone = [group.requests[0] for group in groups if len(group.requests) == 1]
        together = [group for group in groups if len(group.requests) > 1]
        for work in (self._packed(requests, alone), self._from_states(requests, together)):
            for found, num_done in work:
                for request, log_probability, is_greedy in found:
                    sums[request] += log_probability
                    greedy[request] &= is_greedy
                advance(num_done)
        return [Likelihood(*both) for both in zip(sums, greedy, strict=True)]

    def _groups(self, requests: Sequence[Request]) -> list[_Group]:
        """Requests that are computed together, since it is less work; without those that ask for nothing."""
        groups: list[_Group] = []
        numbers = [number for number, request in enumerate(requests) if request.continuation]
        for number in sorted(numbers, key=lambda number: list(requests[number].context)):
            context, size = requests[number].context, len(requests[number].inputs)
            if groups and self.state_rows >= FEWEST_ROWS:
                last = groups[-1]
                shared = _num_same(requests[last.requests[0]].context[: last.shared], context)
                joined = self._cost(shared, len(last.requests) + 1, last.num_inputs + size)
                if joined < self._cost(last.shared, len(last.requests), last.num_inputs) + size:
                    last.shared = shared
                    last.requests.append(number)
                    last.num_inputs += size
                    continue
            groups.append(_Group(len(context), [number], size))
        return groups

    def _cost(self, shared: int, num_requests: int, num_inputs: int) -> int:
        """Tokens to compute for requests with so many inputs, of which each begins with the same `shared` ones."""
        if num_requests == 1:
            return num_inputs
        return num_inputs - (num_requests - 1) * shared + num_requests * self.state_tokens

    def _packed(self, requests: Sequence[Request], numbers: Sequence[int]) -> Iterator[tuple[list[_Found], int]]:
        row = _Row()
        for number in numbers:
            inputs = requests[number].inputs
            if row.tokens and len(row.tokens) + len(inputs) > self.tokens_at_once:
                yield self._predict([row])[0], len(row.asked)
                row = _Row()
            row.starts += [len(row.tokens)] if row.tokens else []
            begin = len(row.tokens) + len(requests[number].context) - 1
            row.asked.append(_Asked(number, begin, requests[number].continuation))
            row.tokens += inputs
        if row.tokens:
            yield self._predict([row])[0], len(row.asked)

    def _from_states(self, requests: Sequence[Request], groups: list[_Group]) -> Iterator[tuple[list[_Found], int]]:
        groups = sorted(groups, key=lambda group: -group.shared)
        while groups:
            count = min(len(groups), self.state_rows, max(1, self.tokens_at_once // groups[0].shared))
            some, groups = groups[:count], groups[count:]
            beginnings = [_Row(requests[group.requests[0]].inputs[: group.shared]) for group in some]
            rests: list[tuple[_Row, int]] = []  # with the row of its state
            for i, group in enumerate(some):
                for number in group.requests:
                    column, targets = len(requests[number].context) - 1 - group.shared, requests[number].continuation
                    if column < 0:  # the first target is predicted from the last token that is shared
                        beginnings[i].asked.append(_Asked(number, group.shared - 1, targets[:1]))
                        column, targets = 0, targets[1:]
                    if targets:
                        rest = requests[number].inputs[group.shared :]
                        rests.append((_Row(rest, asked=[_Asked(number, column, targets)]), i))
            found, states = self._predict(beginnings, pad_left=True)
            rests.sort(key=lambda rest: -len(rest[0].tokens))
            while rests:
                count = min(self.state_rows, max(1, self.tokens_at_once // len(rests[0][0].tokens)))
                rows, of_state = zip(*rests[:count], strict=True)
                rests = rests[count:]
                index = torch.tensor(of_state, device=self.model.device)
                found += self._predict(rows, states.map(lambda memory, index=index: memory[index]))[0]  # type: ignore[misc]
            yield found, sum(len(group.requests) for group in some)

    def _predict(
        self, rows: Sequence[_Row], state: State | None = None, *, pad_left: bool = False
    ) -> tuple[list[_Found], State]:
        """What is found of all that the rows ask for, and the state after them. Rows are filled up to one length: at
        the end; or, for the state, at the beginning, by a document of its own. A row of one long document by itself
        is read in pieces."""
        width = max(len(row.tokens) for row in rows)
        length = width if pad_left or state is not None else -(-width // WIDTHS) * WIDTHS
        tokens, doc_ids = np.zeros((len(rows), length), np.int64), np.zeros((len(rows), length), np.int32)
        asked: list[tuple[int, _Asked]] = []
        for i, row in enumerate(rows):
            shift = length - len(row.tokens) if pad_left else 0
            tokens[i, shift : shift + len(row.tokens)] = row.tokens
            starts = [shift + start for start in row.starts] + ([shift] if shift else [])
            doc_ids[i, starts] = 1
            asked += [(i, part._replace(column=part.column + shift)) for part in row.asked]
        np.cumsum(doc_ids, axis=1, out=doc_ids)
        ids = torch.from_numpy(doc_ids) if doc_ids.any() else None
        found: list[_Found] = []
        piece = max(WIDTHS, self.tokens_at_once // len(rows))
        for begin in range(0, length, piece):
            here = slice(begin, begin + piece)
            hidden, state = self._hidden(torch.from_numpy(tokens[:, here]), ids if ids is None else ids[:, here], state)
            found += self._found(hidden, asked, begin)
        assert state is not None
        return found, state

    def _hidden(self, tokens: Tensor, doc_ids: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        self.model.check_input(tokens, 2, state)
        device = self.model.device
        ids = None if doc_ids is None else doc_ids.contiguous().to(device)
        with autocast(device, self.dtype):
            both: tuple[Tensor, State] = self.model.backbone(tokens.contiguous().to(device), ids, state)
        return both

    def _found(self, hidden: Tensor, asked: Sequence[tuple[int, _Asked]], first: int) -> list[_Found]:
        """What is found in a piece of rows whose first column is `first`."""
        rows: list[int] = []
        columns: list[int] = []
        targets: list[int] = []
        parts: list[tuple[int, int]] = []  # requests, with the number of their targets here
        for row, (request, column, tokens) in asked:
            begin, end = max(0, first - column), min(len(tokens), first + hidden.shape[1] - column)
            if begin < end:
                rows += [row] * (end - begin)
                columns += range(column + begin - first, column + end - first)
                targets += tokens[begin:end]
                parts.append((request, end - begin))
        if not parts:
            return []
        device, weight = hidden.device, self.model.lm_head.weight
        chosen = hidden[torch.tensor(rows, device=device), torch.tensor(columns, device=device)]
        values = []
        for some, target in zip(
            *(tensor.split(max(1, LOGITS_AT_ONCE // weight.shape[0])) for tensor in (chosen, torch.tensor(targets))),
            strict=True,
        ):
            wanted = target.to(device)
            with autocast(device, self.dtype):
                logits = self.model.lm_head(some).float()  # (tokens, V)
            log_probability = logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(1)
            values.append(torch.stack((log_probability, (logits.argmax(1) == wanted).float())))
        log_probabilities, is_likeliest = torch.cat(values, 1).double().cpu().numpy()  # sync point
        found, at = [], 0
        for request, count in parts:
            here = slice(at, at + count)
            found.append((request, float(log_probabilities[here].sum()), bool(is_likeliest[here].all())))
            at += count
        return found


_Found = tuple[int, float, bool]  # request, log-probability, whether all its tokens are the likeliest


def _num_same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    if one == other[: len(one)]:
        return len(one)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
