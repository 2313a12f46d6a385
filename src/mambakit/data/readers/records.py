"""Records: JSON Lines, JSON, CSV, Parquet and Arrow, record by record.

A record becomes a document, by the first of these that it has:
- the `text_column` of the caller: a column, or a template such as "{title}\\n\\n{text}";
- `messages` or `conversations`, a chat. Each turn is written as "<|role|>\\nwhat was said\\n", and only what the
  assistant says, with the newline that ends it, is learned;
- `prompt` and `completion`, one after the other as they are, of which the completion is learned;
- `text`, else `content`, else the only column with words in it.

A record that cannot be used is skipped, and `note` is called with the reason. A file without any other is Unreadable.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from typing import Any, BinaryIO, TypeGuard

from ...files import pip_command
from ..documents import Note, Parts, TextPart, Unreadable, broken, no_note, read_whole
from . import encodings, text

LONGEST_RECORD = 2**26  # characters
LARGEST_JSON = 2**28  # bytes
LEAST_WRONG = 4  # if so many bytes are not UTF-8, the encoding is guessed; fewer are damage
BROKEN_LINES = 10  # a file that begins with so many is not JSON Lines
BATCH_ROWS = 256
NAMED_COLUMNS, LONGEST_NAME = 8, 40  # of columns, in the message that none is the text
COLUMNS = ("text", "content")
CHATS = ("messages", "conversations")
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant"}
DELIMITERS = ",;\t|"


class Number(str):
    """A number of JSON as it is written: no digit is lost, and long numbers take no time to convert."""


DECODER = json.JSONDecoder(parse_float=Number, parse_int=Number, parse_constant=Number)
SPACE = re.compile(r"[ \t\r\n]*")
SURROGATE = re.compile("[\ud800-\udfff]")
PLACE = re.compile(r"\{([^{}]+)\}")


def jsonl(stream: BinaryIO, text_column: str | None = None, note: Note = no_note) -> Parts:
    """JSON Lines: an object or a string on each line."""
    return rows(_json_lines(stream), text_column, note)


def json_(stream: BinaryIO, text_column: str | None = None, note: Note = no_note) -> Parts:
    """JSON: a list of objects or strings, a document each, or a single one. JSON Lines may also have this suffix."""
    return rows(_json_lines(stream) if _has_lines(stream) else _json_values(stream), text_column, note)


def csv_(stream: BinaryIO, text_column: str | None = None, note: Note = no_note) -> Parts:
    """CSV with a header row. The delimiter is the one that is most frequent in the header."""
    return rows(_table(stream, DELIMITERS), text_column, note)


def tsv(stream: BinaryIO, text_column: str | None = None, note: Note = no_note) -> Parts:
    """Tab-separated values with a header row; quotes are those of CSV."""
    return rows(_table(stream, "\t"), text_column, note)


def parquet(stream: BinaryIO, text_column: str | None = None, note: Note = no_note) -> Parts:
    """Parquet, some rows at a time. Only the columns of the text are read."""
    return rows(_parquet(stream, text_column), text_column, note)


def arrow(stream: BinaryIO, text_column: str | None = None, note: Note = no_note) -> Parts:
    """Arrow's file format (also Feather) and its stream format, batch by batch."""
    return rows(_arrow(stream), text_column, note)


# A record, or why there is none.
Records = Iterator[Any | Unreadable]


def rows(records: Records, text_column: str | None = None, note: Note = no_note) -> Parts:
    """The documents in records."""
    reason = "empty"
    columns: list[str] = []  # of the first record that cannot be used
    found, before = False, Counter[str]()  # reasons before the first document: a file without any may be read as text
    for record in records:
        try:
            if isinstance(record, Unreadable):
                raise record
            parts = _parts(record, text_column)
        except Unreadable as problem:
            reason = str(problem)
            if found:
                note(reason)
            else:
                before[reason] += 1
            if isinstance(record, dict) and not columns:
                columns = [f"{str(name)[:LONGEST_NAME]}{_kind(value)}" for name, value in record.items()]
            continue
        if not found:
            found = True
            for skipped in before.elements():
                note(skipped)
        yield from parts
    if not found and reason.startswith("no ") and columns:
        more = f" and {len(columns) - NAMED_COLUMNS} more" if len(columns) > NAMED_COLUMNS else ""
        reason += f"; it has {', '.join(columns[:NAMED_COLUMNS])}{more}: choose with --text-column"
    if not found:
        raise Unreadable(reason)


def _parts(record: Any, text_column: str | None) -> list[TextPart]:
    """The document in a record."""
    if _is_text(record):
        record = {"text": record}
    if not isinstance(record, dict):
        raise Unreadable("no text column")
    if text_column is not None:
        return [TextPart(_filled(record, text_column))]
    for name in CHATS:
        if isinstance(record.get(name), list):
            return _chat(record[name])
    if _is_text(record.get("prompt")) and _is_text(record.get("completion")):
        prompt, completion = _clean(record["prompt"]), _written(record["completion"])
        return [TextPart(prompt, learn=False, ends=False), TextPart(completion)] if prompt else [TextPart(completion)]
    for name in COLUMNS:
        if _is_text(record.get(name)):
            return [TextPart(_written(record[name]))]
    words = [value for value in record.values() if _is_text(value) and not _is_number(value)]
    if len(words) != 1:
        raise Unreadable("no text column")
    return [TextPart(_written(words[0]))]


def _kind(value: Any) -> str:
    """What a column holds that is no text, in brackets."""
    if _is_text(value):
        return ""
    return " (number)" if isinstance(value, Number | int | float) else f" ({type(value).__name__})"


def _filled(record: dict[str, Any], text_column: str) -> str:
    """A column, or a template with columns in it."""

    def value(name: str) -> str:
        found = record.get(name, False)
        if isinstance(found, str | int | float) and not isinstance(found, bool):
            return str(found)
        if found is None:
            return ""
        what = "" if name not in record else f" of text, but of {type(found).__name__}"
        raise Unreadable(f"no column {name}{what}")

    if PLACE.search(text_column):
        return _written(PLACE.sub(lambda place: value(place[1]), text_column))
    return _written(value(text_column))


def _chat(turns: list[Any]) -> list[TextPart]:
    """Turns of {role, content} or {from, value}, as parts that are learned or not learned."""
    pieces: list[tuple[str, bool]] = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise Unreadable("broken chat")
        role, said = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if isinstance(said, list):  # of texts, images and the like
            said = "".join(str(item.get("text") or "") for item in said if isinstance(item, dict))
        if not _is_text(role) or not (said is None or _is_text(said)):
            raise Unreadable("broken chat")
        role = ROLES.get(role.lower(), role.lower())
        if said:
            pieces += [(f"<|{role}|>\n", False), (f"{said}\n", role == "assistant")]
    parts = []
    for learn, group in itertools.groupby(pieces, key=lambda piece: piece[1]):
        parts.append(TextPart("".join(_clean(piece) for piece, _ in group), learn, ends=False))
    if not any(part.learn for part in parts):
        raise Unreadable("a chat without an answer")
    return [*parts[:-1], TextPart(parts[-1].text, parts[-1].learn)]


def _written(words: str) -> str:
    words = _clean(words)
    if not words or words.isspace():
        raise Unreadable("empty")
    return words


def _clean(words: str) -> str:
    """Text as data/readers/text.py gives it: newlines are \\n, there is no NUL and no half of a character."""
    words = words.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
    return words if words.isascii() else SURROGATE.sub("\ufffd", words)


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and not isinstance(value, Number)


def _is_number(value: str) -> bool:
    if len(value) > 40:
        return False
    try:
        float(value)
    except ValueError:
        return not value.strip()
    return True


def _json_lines(stream: BinaryIO) -> Records:
    broken: int | None = 0  # None once a line was good
    for line in _lines(stream):
        if line is not None and line.isspace():
            continue
        record = Unreadable("a line too long") if line is None else _parsed(line)
        if not isinstance(record, Unreadable):
            broken = None
        elif broken is not None:
            broken += 1
            if broken == BROKEN_LINES:
                raise record
        yield record


def _parsed(line: str) -> Any | Unreadable:
    if line.count("\ufffd") * 20 > len(line):
        return Unreadable("not UTF-8")
    try:
        return DECODER.decode(line)
    except RecursionError:
        return Unreadable("nested too deep")
    except ValueError:
        return Unreadable("broken JSON")


def _lines(stream: BinaryIO) -> Generator[str | None]:
    """Lines in any encoding; None for one that is too long. Wrong bytes become U+FFFD: they cost a line at most."""
    if isinstance(stream, io.BufferedReader) and not stream.seekable():  # being unpacked, and read from its beginning
        head = stream.peek(4)
        codec = _codec(io.BytesIO(head[: head.rfind(b"\n") + 1] or head.rstrip(encodings.NOT_ASCII)))
    else:
        codec = _codec(stream)
        stream.seek(0)
    wrapper = io.TextIOWrapper(stream, codec, errors="replace", newline="\n")
    try:
        while line := wrapper.readline(LONGEST_RECORD + 1):
            if len(line) > LONGEST_RECORD:
                while line and not line.endswith("\n"):
                    line = wrapper.readline(LONGEST_RECORD)
                yield None
            else:
                yield line
    finally:
        if not stream.closed:  # by a reader that was given up half-way
            wrapper.detach()


def _codec(stream: BinaryIO) -> str:
    """UTF-16 or UTF-32 by the first bytes, as the JSON standard says; else the encoding of the whole file."""
    stream.seek(0)
    codec: str = json.detect_encoding(stream.read(4))
    if codec.startswith("utf-8"):
        try:
            codec = encodings.find(stream, least_wrong=LEAST_WRONG).codec
        except Unreadable:
            codec = "utf-8-sig"
    return codec


def _has_lines(stream: BinaryIO) -> bool:
    """Whether the first line is an object, and more lines follow."""
    lines = _lines(stream)
    first, second = next(lines, ""), next(lines, "")
    lines.close()
    return first is not None and first.startswith("{") and second != "" and isinstance(_parsed(first), dict)


def _json_values(stream: BinaryIO) -> Records:
    """The value of a file; the values of a list one by one."""
    stream.seek(0)
    data = read_whole(stream, LARGEST_JSON)
    whole = data.decode(_codec(io.BytesIO(data)), "replace")
    del data
    if whole.count("\ufffd") * 20 > len(whole):
        raise Unreadable("not UTF-8")
    at = _skip_space(whole, 0)
    if at == len(whole):
        raise Unreadable("empty")
    is_list = whole[at] == "["
    if is_list and whole[_skip_space(whole, at + 1) :][:1] == "]":
        raise Unreadable("empty")
    more = True
    while more:
        try:
            value, at = DECODER.raw_decode(whole, _skip_space(whole, at + is_list))
        except RecursionError:
            raise Unreadable("nested too deep") from None
        except ValueError:
            raise Unreadable("broken JSON") from None
        yield value
        at = _skip_space(whole, at)
        more = is_list and whole[at : at + 1] == ","
    if whole[at : at + 1] != ("]" if is_list else ""):
        raise Unreadable("broken JSON")


def _skip_space(whole: str, at: int) -> int:
    match = SPACE.match(whole, at)
    return match.end() if match else at


def _table(stream: BinaryIO, delimiters: str) -> Records:
    """Rows as records, by the names in the first."""
    csv.field_size_limit(LONGEST_RECORD)  # for the whole process; the default refuses long documents
    fed = 0

    def lines() -> Iterator[str]:
        nonlocal fed
        for line in _split(part.text for part in text.read(stream)):
            fed += len(line)
            if fed > LONGEST_RECORD:
                raise Unreadable("a line too long")  # most often a quote that is never closed
            yield line

    source = lines()
    first = next(source)
    delimiter = max(delimiters, key=first.count)  # the first of equally frequent ones
    table = csv.reader(itertools.chain([first], source), delimiter=delimiter)
    try:
        names = [name.strip() for name in next(table)]
        fed = 0
        for row in table:
            fed = 0
            if len(row) > len(names):
                yield Unreadable("a row with too many columns")
            elif row:
                yield dict(zip(names, row, strict=False))
    except csv.Error:
        raise Unreadable("broken CSV") from None


def _split(pieces: Iterable[str]) -> Iterator[str]:
    """Lines with their ends, from pieces of text."""
    held: list[str] = []
    size = 0
    for piece in pieces:
        *lines, rest = piece.split("\n")
        for line in lines:
            yield "".join((*held, line, "\n"))
            held, size = [], 0
        held.append(rest)
        size += len(rest)
        if size > LONGEST_RECORD:
            raise Unreadable("a line too long")
    if size:
        yield "".join(held)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise Unreadable(f"needs pyarrow: {pip_command('datasets')}") from None
    return pyarrow


def _parquet(stream: BinaryIO, text_column: str | None) -> Records:
    pyarrow = _pyarrow()
    stream.seek(0)
    with broken("Parquet", (Unreadable, MemoryError)):
        file = pyarrow.parquet.ParquetFile(stream, buffer_size=2**20, pre_buffer=False)
        columns = _columns(file.schema_arrow.names, text_column)
        for batch in file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
            yield from batch.to_pylist()


def _columns(names: list[str], text_column: str | None) -> list[str] | None:
    """The columns that may hold the text; None for all."""
    wanted = [*CHATS, "prompt", "completion", *COLUMNS]
    if text_column is not None:
        wanted = PLACE.findall(text_column) or [text_column]
    return [name for name in wanted if name in names and "." not in name] or None


def _arrow(stream: BinaryIO) -> Records:
    pyarrow = _pyarrow()
    stream.seek(0)
    is_file = stream.read(6) == b"ARROW1"
    stream.seek(0)
    with broken("Arrow", (Unreadable, MemoryError)):
        if is_file:
            file = pyarrow.ipc.open_file(stream)
            batches = (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            batches = iter(pyarrow.ipc.open_stream(stream))
        for batch in batches:
            batch.validate(full=True)  # else pyarrow follows wrong offsets
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from batch.slice(start, BATCH_ROWS).to_pylist()
