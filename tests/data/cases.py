"""Folders of shards and of text that the tests of this room share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mambakit.data import shards
from mambakit.data.shards import LAYOUTS, SPLITS, Index, ShardWriter, SplitCounts, TokenStream
from mambakit.data.tokenize import bytes_tokenizer
from mambakit.files import checksum, write_json

Documents = Sequence[Sequence[int]]


def random_documents(lengths: Sequence[int], vocab_size: int = 50, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]


def write_shards(
    folder: Path,
    documents: Documents,
    *,
    layout: str = "packed32",
    shard_tokens: int = 2**20,
    vocab_size: int = 257,
    no_targets: Sequence[int] = (),
) -> Path:
    """A folder of shards with these documents in its train split; those numbered in `no_targets` count for nothing."""
    folder.mkdir(parents=True)
    bytes_tokenizer().save(str(folder / shards.TOKENIZER))
    chosen = LAYOUTS[layout]
    counts = dict.fromkeys(SPLITS, SplitCounts())
    written = {}
    for split in SPLITS:
        with ShardWriter(folder, split, chosen, shard_tokens) as writer:
            for number, tokens in enumerate(documents if split == "train" else []):
                packed = chosen.pack(np.array(tokens, dtype=np.int64), 0, starts_document=True)
                if number in no_targets:
                    packed &= ~chosen.dtype.type(1 << (chosen.token_bits + chosen.position_bits))
                writer.write(packed)
            written[split] = writer.close()
    targets = sum(len(tokens) - 1 for number, tokens in enumerate(documents) if number not in no_targets)
    counts["train"] = SplitCounts(documents=len(documents), tokens=sum(map(len, documents)), targets=targets)
    index = Index(
        format="mambakit-shards",
        version=1,
        layout=layout,
        tokenizer="bytes",
        tokenizer_sha256=checksum(folder / shards.TOKENIZER),
        vocab_size=vocab_size,
        end_token=256,
        counts=counts,
        shards=written,
        sources={},
    )
    write_json(folder / shards.INDEX, index.model_dump())
    return folder


def whole_documents(stream: TokenStream, block: int = 2**20) -> list[list[int]]:
    """The documents of a stream as token ids, put together from its pieces."""
    found: list[list[int]] = []
    for packed, starts in stream.documents(block):
        if starts:
            found.append([])
        found[-1].extend(stream.layout.tokens(packed).tolist())
    return found


def write_texts(folder: Path, texts: Mapping[str, str | bytes]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def documents_of(stream: TokenStream) -> list[list[int]]:
    """The tokens of each document of a split."""
    found: list[list[int]] = []
    for packed, starts in stream.documents(block=7):
        tokens = stream.layout.tokens(packed).tolist()
        if starts:
            found.append(tokens)
        else:
            found[-1] += tokens
    return found
