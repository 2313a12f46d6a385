"""The text to be predicted, as tokens and as words: from shards, from files of tokens, or tokenized now."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..checkpoint import CheckpointError
from ..data.foreign import import_tokens, is_tokens
from ..data.lanes import Range, document_ranges
from ..data.prepare import SHARD_TOKENS, documents, prepare, write_index
from ..data.shards import LAYOUTS, TOKENIZER, ShardWriter, SplitCounts, TokenStream, is_shards, read_tokenizer
from ..data.tokenize import Encoder, end_of, same_tokenizer, vocab_size
from ..files import UserError
from ..progress import progress, say
from .scoring import ModelResult, Score

BLOCK = 2**20  # tokens that are looked at in one go
LARGEST_EXPONENT = 700.0  # exp of more would overflow
LETTERS = "Aa Éé ﬁ"  # a tokenizer that changes these does not decode to its input


@dataclass(frozen=True)
class Document:
    """A document's text, in parts that are learned and not learned, without the token that ends it."""

    parts: list[tuple[bool, str]]
    ends: bool  # whether it has such a token: one that is cut short has not


@dataclass(frozen=True)
class Sources:
    """Where text is, and how it is read."""

    names: list[str]
    options: dict[str, Any]  # text_column and separator, as for `prepare`

    def tokenized(self, tokenizer: Tokenizer, stack: ExitStack) -> TokenStream:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mambakit-")))
        given = str(folder / "given.json")
        tokenizer.save(given)
        prepare(self.names, folder / "shards", tokenizer=given, val_fraction=0, **self.options)
        return TokenStream(folder / "shards", "train")

    def documents(self) -> Iterator[str]:
        return (document for _, document in documents(self.names, **self.options))

    def check_unused(self) -> None:
        """These options have no effect on tokens."""
        for name, value in self.options.items():
            if value is not None:
                raise UserError(f"{name} says how text is read, but {self.names[0]} holds tokens; leave it out")


class EvaluatedText:
    """The documents to be predicted, as tokens and as text."""

    def __init__(
        self, stream: TokenStream, ranges: list[Range], tokenizer: Tokenizer, sources: Sources | None = None
    ) -> None:
        """`sources` is where the text was read that all of the stream was made of, if it was."""
        self.stream, self.ranges, self.tokenizer = stream, ranges, tokenizer
        counts = stream.counts
        self.num_tokens = int(sum(end - begin for begin, end in ranges))
        self.is_whole = self.num_tokens == len(stream)
        self.sources = sources if self.is_whole else None
        self.is_learned = counts.targets == counts.tokens - counts.documents  # all of it
        # Bytes of all of it; bytes, words and first tokens of what is learned, which is what figures are of.
        self.all_bytes = self.num_bytes = counts.bytes
        self.num_words, self.num_firsts = counts.words, len(ranges)
        if not (self.is_whole and self.is_learned and counts.bytes):
            found = self._decoded
            self.all_bytes, self.num_bytes = found["bytes"], found["learned bytes"]
            self.num_words, self.num_firsts = found["learned words"], found["learned firsts"]

    @cached_property
    def _decoded(self) -> Counter[str]:
        """The size of what the tokens decode to, and of the parts of it that are learned."""
        found = Counter[str]()
        for document in self.documents():
            found["learned firsts"] += document.parts[0][0] if document.parts else 1
            for is_learned, part in document.parts:
                sizes = {"bytes": len(part.encode()), "words": len(part.split())}
                found.update(sizes)
                if is_learned:
                    found.update({f"learned {name}": size for name, size in sizes.items()})
        return found

    def documents(self) -> Iterator[Document]:
        """What the tokens decode to."""
        layout, end_token = self.stream.layout, self.stream.index.end_token
        for begin, end in self.ranges:
            packed = self.stream.read(begin, end)
            tokens, is_learned = layout.tokens(packed), layout.is_target(packed)
            is_learned[0] = len(packed) == 1 or is_learned[1]  # a document's first token is no target in any case
            if ends := bool(tokens[-1] == end_token):
                tokens, is_learned = tokens[:-1], is_learned[:-1]
            cuts = np.flatnonzero(is_learned[1:] != is_learned[:-1]) + 1
            parts = [
                (bool(learned[0]), str(self.tokenizer.decode(piece.tolist(), skip_special_tokens=False)))
                for piece, learned in zip(np.split(tokens, cuts), np.split(is_learned, cuts), strict=True)
                if len(piece)
            ]
            if parts and not ends:  # cut short, perhaps inside a character
                parts[-1] = parts[-1][0], parts[-1][1].rstrip("\ufffd")
            yield Document(parts, ends)

    @cached_property
    def why_not_exact(self) -> str | None:
        """Why what the tokens decode to is not the text that they were made of; None where it is, or nobody knows."""
        normalizer = self.tokenizer.normalizer
        if normalizer is not None and normalizer.normalize_str(LETTERS).replace("▁", " ").strip() != LETTERS:
            return "the model's tokenizer changes letters before it reads them"
        counts = self.stream.counts
        if self.is_whole and counts.bytes:
            num_bytes, num_words = self._decoded["bytes"], self._decoded["words"]
            if (num_bytes, num_words) != (counts.bytes, counts.words):
                return (
                    f"the model's tokenizer loses some of it: the tokens decode to {num_bytes:,} bytes and "
                    f"{num_words:,} words, but were made of {counts.bytes:,} and {counts.words:,}"
                )
        return None

    def result(self, name: str, found: Score, window: int | None) -> ModelResult:
        if found.targets == 0:
            raise UserError("the text has no token to predict: its documents have one token each")
        if not math.isfinite(found.loss_sum):
            raise UserError(f"the loss of {name} is {found.loss_sum}: its weights are not finite, or overflow")
        nats = found.loss_sum + self.num_firsts * math.log(self.stream.index.vocab_size)
        per_word = nats / self.num_words if self.num_words else None
        return ModelResult(
            model=name,
            loss=found.loss,
            perplexity=math.exp(found.loss) if found.loss < LARGEST_EXPONENT else None,
            word_perplexity=math.exp(per_word) if per_word is not None and per_word < LARGEST_EXPONENT else None,
            bits_per_byte=nats / math.log(2) / self.num_bytes if self.num_bytes else None,
            documents=len(self.ranges),
            targets=found.targets,
            words=self.num_words,
            bytes=self.num_bytes,
            window=window,
        )


def open_text(
    sources: Sources, split: str, tokenizer: Tokenizer, model: Path, stack: ExitStack, max_tokens: int | None
) -> EvaluatedText:
    """Tokens of the model's own tokenizer: from shards made with it, or made now from text."""
    paths = [Path(name) for name in sources.names]
    folder, has_tokens = paths[0], all(is_tokens(path) for path in paths)
    if not has_tokens and not is_shards(folder):
        stream = sources.tokenized(tokenizer, stack)
        return EvaluatedText(stream, _ranges(stream, folder, split, max_tokens), tokenizer, sources)
    sources.check_unused()
    if has_tokens:
        given = model / TOKENIZER
        if not given.is_file():
            given = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mambakit-"))) / TOKENIZER
            tokenizer.save(str(given))
        stream = TokenStream(
            import_tokens(paths, str(given), split="train"), "train"
        )  # all of them, whatever their names
    else:
        if len(paths) > 1:
            raise UserError("--data names a folder of shards and more; name one such folder, or text alone")
        stream = TokenStream(folder, split)
        if not same_tokenizer(read_tokenizer(folder), tokenizer.to_str()):
            raise UserError(
                f"the shards in {folder} were made with another tokenizer than {model} has; "
                "evaluate on the text itself, or prepare it with this model's tokenizer.json"
            )
    return EvaluatedText(stream, _ranges(stream, folder, split, max_tokens), tokenizer)


def _ranges(stream: TokenStream, folder: Path, split: str, max_tokens: int | None) -> list[Range]:
    ranges = document_ranges(stream, max_tokens)
    if not ranges:
        raise UserError(f"the {split} split of {folder} is empty; choose another with --split")
    if max_tokens is not None and len(ranges) < stream.counts.documents:
        say(f"evaluating {len(ranges):,} of {stream.counts.documents:,} documents, which have {max_tokens:,} tokens")
    return ranges


def check_ids(name: str, stream: TokenStream, num_ids: int) -> None:
    """Checked before the model runs: an error on a GPU would not name the token."""
    for begin in range(0, len(stream), BLOCK):
        largest = int(stream.layout.tokens(stream.read(begin, begin + BLOCK)).max())
        if largest >= num_ids:
            raise CheckpointError(
                f"{name} has {num_ids} tokens, but its tokenizer.json gives number {largest}: they are not of one model"
            )


def encode_again(text: EvaluatedText, tokenizer: Tokenizer, stack: ExitStack) -> TokenStream:
    """The documents of a text in the tokens of another tokenizer."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mambakit-")))
    layout = LAYOUTS["packed32" if vocab_size(tokenizer) <= LAYOUTS["packed32"].largest_vocabulary else "wide64"]
    encoder, found = Encoder(tokenizer), Counter[str]()
    with (
        ShardWriter(folder, "train", layout, SHARD_TOKENS) as writer,
        progress("tokenizing", text.all_bytes, "MB", 1e6) as advance,
    ):
        for document in text.documents():
            position = 0
            for number, (is_learned, part) in enumerate(document.parts, 1):
                encoded = encoder.encode(part.encode())
                tokens = encoded.tokens
                if document.ends and number == len(document.parts) and position + len(tokens):
                    tokens = np.append(tokens, end_of(tokenizer))
                packed = layout.pack(tokens, position, starts_document=position == 0, learn=is_learned)
                writer.write(packed)
                found["documents"] += position == 0 and len(packed) > 0
                found["tokens"] += len(packed)
                found["targets"] += int(layout.is_target(packed).sum())
                found["bytes"] += encoded.num_bytes
                found["words"] += encoded.num_words
                position += len(packed)
                advance(encoded.num_bytes)
        written = writer.close()
    counts = {"train": SplitCounts(**found), "val": SplitCounts()}
    write_index(folder, layout, "given", tokenizer, {"train": written, "val": []}, counts, {})
    return TokenStream(folder, "train")
