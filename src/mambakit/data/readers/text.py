"""Plain text in any encoding, in pieces, so that a file of one line may be larger than memory.

The encoding is settled before the first piece, and all of the file must be in it: UTF-8 if it can be; UTF-16 or UTF-32
with a byte-order mark, or by where zero bytes lie; else what the file names itself, or charset-normalizer makes of the
lines that are not ASCII. Newlines become \\n and NUL is dropped; everything else stays.
"""

from __future__ import annotations

import codecs
import io
import itertools
import re
from collections.abc import Iterator
from typing import BinaryIO

from ...files import UserError
from ..documents import Part, Unreadable

PIECE_CHARACTERS = 2**18
READ_BYTES = PIECE_CHARACTERS - 16  # a character has at least a byte; what a decoder held back may come on top
SAMPLE_BYTES = 2**20
HEAD_BYTES = 2**10

MARKS = {  # UTF-32's first, since UTF-16's is the beginning of one of them
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
CONTROLS = bytes(set(range(32)) - set(b"\b\t\n\f\r\x1a\x1b"))  # those that text does without
CLEAN_SHARE = 16  # text with NULs has at most one such control character in so many bytes
# What a file may be in besides Unicode; of two that read it equally well, the earlier wins.
LIKELY = (
    "cp1252", "cp1251", "cp1250", "gb18030", "big5", "cp950", "big5hkscs", "cp932", "euc_jp", "euc_jis_2004", "cp949",
    "koi8_r", "koi8_u", "cp866", "iso8859_5", "mac_cyrillic", "iso8859_2", "iso8859_15", "cp1253", "iso8859_7",
    "cp1254", "cp1255", "iso8859_8", "cp1256", "iso8859_6", "cp874", "cp850", "cp437", "cp852", "mac_roman",
)  # fmt: skip
UNLIKELY = ("cp1257", "cp1258", "iso8859_4", "iso8859_9", "iso8859_13", "iso8859_16")  # only if the file says so
WIDER = {  # names that are used for more than they mean
    "iso8859_1": "cp1252",
    "ascii": "cp1252",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
}
DECLARATION = re.compile(rb"""(?:encoding|charset|coding)\s*[=:]\s*["']?([A-Za-z0-9_.:-]{1,40})""")


def read(stream: BinaryIO) -> Iterator[Part]:
    """The file as one document, in parts of at most PIECE_CHARACTERS."""
    pieces = _pieces(stream, _encoding(stream))
    waiting = next(pieces)
    for piece in pieces:
        yield Part(waiting, ends=False)
        waiting = piece
    yield Part(waiting)


def decode(data: bytes) -> str:
    """The text of a whole small input. Raises Unreadable as `read` does."""
    return "".join(part.text for part in read(io.BytesIO(data)))


def _pieces(stream: BinaryIO, encoding: str) -> Iterator[str]:
    """All text from the beginning of the file; a piece is never empty. Raises UnicodeError."""
    stream.seek(0)
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(), translate=True)
    more = True
    while more:
        block = stream.read(READ_BYTES)
        more = bool(block)
        if piece := decoder.decode(block, final=not more).replace("\0", ""):
            yield piece


def _fault(stream: BinaryIO, encoding: str) -> int | None:
    """A place shortly before the first that is not in this encoding, or None if all of the file is."""
    blank = True
    try:
        for piece in _pieces(stream, encoding):
            blank = blank and piece.isspace()
    except UnicodeError:
        return max(0, stream.tell() - 2 * READ_BYTES)
    if blank:
        raise Unreadable("empty")
    return None


def _encoding(stream: BinaryIO) -> str:
    stream.seek(0)
    head = stream.read(SAMPLE_BYTES)
    for mark, encoding in MARKS.items():
        if head.startswith(mark):
            if _fault(stream, encoding) is not None:
                raise Unreadable("unknown encoding")
            return encoding
    has_nul = b"\0" in head
    fault = 0
    if not has_nul or len(head) - len(head.translate(None, CONTROLS)) <= len(head) // CLEAN_SHARE:
        found = _fault(stream, "utf-8-sig")
        if found is None:
            return "utf-8-sig"
        fault = found
    if has_nul:
        wide = _without_mark(head)
        if wide is None or _fault(stream, wide) is not None:
            raise Unreadable("binary")
        return wide
    sample = _sample(stream, fault)
    replaced = sample.decode("utf-8", "replace")
    if 2 * replaced.count("\ufffd") <= sum(not character.isascii() for character in replaced):
        raise Unreadable("damaged UTF-8")  # in a one-byte encoding it would be read to the end, as nonsense
    for guess in itertools.chain(_declared(head), _guesses(sample)):
        if _fault(stream, guess) is None:
            return guess
    raise Unreadable("unknown encoding")


def _without_mark(head: bytes) -> str | None:
    """UTF-16 or UTF-32 without a mark. Of UTF-16's two bytes, the one that varies less is the high one."""
    variety = [(len(set(head[half::2])), -head[half::2].count(0)) for half in (0, 1)]
    order = ["utf-16-be", "utf-16-le"] if variety[0] < variety[1] else ["utf-16-le", "utf-16-be"]
    for encoding in ("utf-32-le", "utf-32-be", *order):
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(head)
        except UnicodeError:
            continue
        odd = sum(not (character.isprintable() or character.isspace()) for character in text)
        if odd <= len(text) // 100:
            return encoding
    return None


def _sample(stream: BinaryIO, fault: int) -> bytes:
    """Lines that are not ASCII, since the others say nothing, from where the file stops being UTF-8."""
    stream.seek(fault)
    data = stream.read(SAMPLE_BYTES)
    if fault:
        data = data[data.find(b"\n") + 1 :]  # not from the middle of a character
    return b"".join(line for line in data.splitlines(keepends=True) if not line.isascii())


def _declared(head: bytes) -> Iterator[str]:
    """The encoding that the file names itself, as XML, HTML and source code do, if it is one we know."""
    match = DECLARATION.search(head[:HEAD_BYTES])
    try:
        name = codecs.lookup(match[1].decode()).name.replace("-", "_") if match else ""
    except LookupError:
        return
    name = WIDER.get(name, name)
    if name in LIKELY or name in UNLIKELY:
        yield name


def _guesses(sample: bytes) -> Iterator[str]:
    """Encodings that the sample may be in, best first."""
    try:
        import charset_normalizer
    except ImportError:
        raise UserError(
            "reading text that is not UTF-8 needs charset-normalizer: pip install 'mambakit[documents]'"
        ) from None
    found = set()
    for match in charset_normalizer.from_bytes(sample, steps=20, cp_isolation=list(LIKELY)):
        for name in match.could_be_from_charset:
            if name in LIKELY:  # how little it looks like a mess, then how much like a language
                coherence = match.coherence + (0.03 if name == LIKELY[0] else 0.0)
                found.add((round(match.chaos, 2), -round(coherence, 2), LIKELY.index(name)))
    for _, _, rank in sorted(found):
        yield LIKELY[rank]
