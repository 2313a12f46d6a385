"""What the model knows after texts that it has read: a prompt that begins with one of them reads only the rest."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from ..decoding import Memory
from ..model import State

BYTES_PER_TOKEN = 40  # a number in a list


class PrefixCache:
    """Memories by the tokens they stand for. The one that was not used for longest goes first.

    The state of a Mamba cannot be cut back, so that a memory serves only texts that begin with all of its tokens.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._entries: OrderedDict[tuple[str, int], Memory] = OrderedDict()  # by model and key of the tokens
        self._lengths: Counter[tuple[str, int]] = Counter()  # entries of a model that have so many tokens

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, model: str, tokens: Sequence[int]) -> Memory | None:
        """The memory of the longest beginning of a text; of all of it only where it has the scores that come next."""
        found: tuple[str, int] | None = None
        for length, key in enumerate(_keys(tokens), 1):
            if (model, length) in self._lengths and (model, key) in self._entries:
                memory = self._entries[model, key]
                if list(memory.tokens) == list(tokens[:length]) and (length < len(tokens) or has_scores(memory)):
                    found = (model, key)
        if found is None:
            return None
        self._entries.move_to_end(found)
        return self._entries[found]

    def put(self, model: str, memory: Memory) -> None:
        size = num_bytes(memory)
        if size > self.max_bytes or not memory.tokens:
            return
        *_, key = _keys(memory.tokens)
        name = (model, key)
        if (known := self._entries.get(name)) is not None:
            self._entries.move_to_end(name)
            if has_scores(known) or not has_scores(memory):
                return
            self._remove(name)
        self._entries[name] = memory
        self._lengths[model, len(memory.tokens)] += 1
        self.num_bytes += size
        while self.num_bytes > self.max_bytes:
            self._remove(next(iter(self._entries)))

    def forget(self, model: str) -> None:
        """All memories of a model."""
        for name in [name for name in self._entries if name[0] == model]:
            self._remove(name)

    def _remove(self, name: tuple[str, int]) -> None:
        memory = self._entries.pop(name)
        self.num_bytes -= num_bytes(memory)
        length = (name[0], len(memory.tokens))
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]


def num_bytes(memory: Memory) -> int:
    tensors = (*memory.state.tensors(), memory.logits)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + BYTES_PER_TOKEN * len(memory.tokens)


def has_scores(memory: Memory) -> bool:
    return memory.logits.numel() > 0


def without_scores(state: State, tokens: Sequence[int], like: State) -> Memory:
    """A memory from which a text can be read on; of the dtypes that reading gives."""
    pairs = zip(state.layers, like.layers, strict=True)
    layers = tuple({name: tensor.to(model[name].dtype) for name, tensor in layer.items()} for layer, model in pairs)
    return Memory(State(layers), state.tensors()[0].new_empty(1, 0), list(tokens))


def _keys(tokens: Sequence[int]) -> Iterator[int]:
    """A number for each beginning of a text. Two texts may have the same."""
    key = 0
    for token in tokens:
        key = hash((key, token))
        yield key
