"""Records and packed files: which text a record has, what is passed over and why, and that hostile files stay small."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import sys
import tarfile
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import pytest

from mambakit.data.documents import TextPart, Unreadable
from mambakit.data.readers import packed, records

Read = Callable[..., Iterator[Any]]


def _texts(read: Read, data: bytes, *args: Any) -> list[str]:
    return [part.text for part in read(io.BytesIO(data), *args)]


def _reason(read: Read, data: bytes, *args: Any) -> str:
    with pytest.raises(Unreadable) as caught:
        list(read(io.BytesIO(data), *args))
    return str(caught.value)


def _lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def _parts(record: Any) -> list[TextPart]:
    return list(records.jsonl(io.BytesIO(_lines(record))))


@pytest.mark.parametrize(
    ("record", "text_column", "expected"),
    [
        ({"text": "a", "content": "b"}, None, "a"), ({"content": "b", "title": "c"}, None, "b"), ("just this", None, "just this"),
        ({"id": 1, "n": "12.5", "blank": " ", "body": "words", "tags": ["x"]}, None, "words"),
        ({"text": "a", "other": "b"}, "other", "b"), ({"n": 1.10, "title": None, "text": "b"}, "{title}#{n}: {text}", "#1.1: b"),
        ({"text": "a\r\nb\rc\0d\ud800e😀"}, None, "a\nb\ncd\ufffde😀"), ({"text": 10**50}, "text", "1" + 50 * "0"),
    ],
)  # fmt: skip
def test_a_records_text(record: Any, text_column: str | None, expected: str) -> None:
    assert _texts(records.jsonl, _lines(record), text_column) == [expected]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"a": "two", "b": "columns"}, "no text column"), ([1], "no text column"), ({"text": " \n"}, "empty"), ({}, "no text column"), ({"text": 5}, "no text column"),
        ({"messages": ["x"]}, "broken chat"), ({"messages": [{"role": 1, "content": "x"}]}, "broken chat"),
        ({"messages": [{"role": "user", "content": "x"}]}, "a chat without an answer"), ({"messages": []}, "a chat without an answer"),
    ],
)  # fmt: skip
def test_records_without_text(record: Any, reason: str) -> None:
    notes: list[str] = []
    assert _texts(records.jsonl, _lines(record, {"text": "good"}), None, notes.append) == ["good"]
    assert notes == [reason]
    assert _reason(records.jsonl, _lines(record)).split(";")[0] == reason


def test_a_column_that_is_not_there_is_named() -> None:
    there = "no column body; it has text, title: choose with --text-column"
    assert _reason(records.jsonl, _lines({"text": "a", "title": "b"}), "body") == there
    assert _reason(records.jsonl, _lines({"text": "a", "title": "b"}), "{body}") == there
    assert _reason(records.jsonl, _lines({"text": ["a"], "id": 1}), "{text}") == (
        "no column text of text, but of list; it has text (list), id (number): choose with --text-column"
    )
    assert (
        _reason(records.jsonl, _lines({"q": "a", "a": "b"})) == "no text column; it has q, a: choose with --text-column"
    )


def test_of_many_columns_only_some_are_named() -> None:
    reason = _reason(records.jsonl, _lines({f"{number}{'x' * 10000}": "words" for number in range(1000)}))
    assert reason.endswith(" and 992 more: choose with --text-column") and len(reason) < 500


def test_prompts_are_not_learned() -> None:
    assert _parts({"prompt": "2+2=", "completion": "4"}) == [TextPart("2+2=", learn=False, ends=False), TextPart("4")]
    assert _parts({"prompt": "", "completion": "4"}) == [TextPart("4")]


@pytest.mark.parametrize(
    "names", [("messages", "role", "content", "user", "assistant"), ("conversations", "from", "value", "human", "gpt")]
)
def test_only_the_assistants_turns_are_learned(names: tuple[str, ...]) -> None:
    column, role, content, user, assistant = names
    said = [("system", "Be kind."), (user, "Hi"), (assistant, "Hello!"), (user, "Bye"), (assistant, "Farewell.")]
    assert _parts({column: [{role: who, content: what} for who, what in said], "text": "not this"}) == [
        TextPart("<|system|>\nBe kind.\n<|user|>\nHi\n<|assistant|>\n", learn=False, ends=False),
        TextPart("Hello!\n", ends=False),
        TextPart("<|user|>\nBye\n<|assistant|>\n", learn=False, ends=False),
        TextPart("Farewell.\n"),
    ]


def test_a_chat_may_end_with_the_user_and_hold_more_than_text() -> None:
    turns = [
        {"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": "A cat."}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "No."},
    ]
    *_, before, last = _parts({"messages": turns})
    assert (before, last) == (TextPart("A cat.\n", ends=False), TextPart("<|user|>\nNo.\n", learn=False))


def test_single_broken_lines_are_passed_over() -> None:
    good = _lines({"text": "good"})
    notes: list[str] = []
    data = b"{broken\n" + good + b"\n" + b"[" * 100_000 + b"\n" + b'"\xff\xfe\xff\n' + good + b'{"text": "cut of'
    assert _texts(records.jsonl, data, None, notes.append) == ["good", "good"]
    assert notes == ["broken JSON", "nested too deep", "not UTF-8", "broken JSON"]
    assert _texts(records.jsonl, b"x\n" * 9 + good) == ["good"]
    assert _texts(records.jsonl, good + b"x\n" * 20 + good) == ["good", "good"]
    assert _reason(records.jsonl, b"x\n" * 10 + good) == "broken JSON"
    assert _reason(records.jsonl, b"x\n") == "broken JSON"
    assert _reason(records.jsonl, b"\n \n") == "empty"


def test_lines_in_other_forms_of_unicode() -> None:
    data = '{"text": "日本"}\r\n{"text": "é"}'
    for encoding in ("utf-8-sig", "utf-16", "utf-16-be", "utf-32"):
        assert _texts(records.jsonl, data.encode(encoding)) == ["日本", "é"]
    assert _texts(records.jsonl, b'{"text": "' + b"x" * 99 + b'\xff"}') == ["x" * 99 + "\ufffd"]


def test_a_line_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LONGEST_RECORD", 100)
    assert _reason(records.jsonl, _lines({"text": "x" * 100})) == "a line too long"
    assert _reason(records.csv_, b"text\n" + b"x" * 101) == "a line too long"
    assert _reason(records.csv_, b'text\n"never closed\n' + b"x\n" * 50) == "a line too long"
    assert len(_texts(records.csv_, b"text\n" + b"some words\n" * 50)) == 50


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ('[{"text": "a"}, "b" , {"text": "c"}]\n', ["a", "b", "c"]), ('{\n"text": "a"\n}', ["a"]), ('"a"', ["a"]),
        ('{"text": "a"}\n{"text": "b"}\n', ["a", "b"]), ('{"text": "a"}\n', ["a"]), ('["\\ud83d\\ude00\\udada"]', ["😀\ufffd"]),
    ],
)  # fmt: skip
def test_json(data: str, expected: list[str]) -> None:
    for encoding in ("utf-8", "utf-8-sig"):
        assert _texts(records.json_, data.encode(encoding)) == expected
    if not data.startswith('{"'):
        assert _texts(records.json_, data.encode("utf-16-be")) == expected


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"), (b" ", "empty"), (b"[ ]", "empty"), (b"[" * 100_000, "nested too deep"), (b'{"a":' * 100_000, "nested too deep"),
        (b"{", "broken JSON"), (b'["a" "b"]', "broken JSON"), (b'["a",]', "broken JSON"), (b'["a"', "broken JSON"), (b'"a" "b"', "broken JSON"),
        (b"[1, 2]", "no text column"), (b'["\xe6\x97\xa5\xff\xff\xff"]', "not UTF-8"), (b"[" + b"1" * 1_000_000 + b"]", "no text column"),
    ],
)  # fmt: skip
def test_json_that_gives_no_text(data: bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=f"^{reason}$"):
        for _ in records.json_(io.BytesIO(data)):
            pass


def test_json_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LARGEST_JSON", 30)
    assert _reason(records.json_, b'[{"text": "' + b"x" * 30 + b'"}]') == "too large"
    assert len(_texts(records.json_, _lines(*[{"text": "lines are not limited"}] * 9))) == 9


def test_csv_with_quotes_newlines_and_delimiters() -> None:
    rows = [["id", "text"], ["1", 'said "yes",\nand left'], ["2", "second; third"], ["3", ""]]
    notes: list[str] = []
    for delimiter in ",;\t|":
        out = io.StringIO()
        csv.writer(out, delimiter=delimiter).writerows(rows)
        assert _texts(records.csv_, out.getvalue().encode(), None, notes.append) == [
            'said "yes",\nand left',
            "second; third",
        ]
        if delimiter == "\t":
            assert len(_texts(records.tsv, out.getvalue().encode())) == 2
    assert notes == ["empty"] * 4
    assert _texts(records.csv_, b"label,review\n1,good film\n0,bad film\n") == ["good film", "bad film"]
    assert _texts(records.csv_, b"one column\n" + b"x" * 200_000) == ["x" * 200_000]


def test_csv_reasons_and_encodings() -> None:
    notes: list[str] = []
    assert _texts(records.csv_, b"text\nb,c\nd\n\ne", None, notes.append) == ["d", "e"]
    assert notes == ["a row with too many columns"]
    assert _texts(records.tsv, "text\n«Привет», сказал он\n".encode("utf-16"), "text") == ["«Привет», сказал он"]
    assert _reason(records.csv_, b"") == "empty"
    assert _reason(records.csv_, b"text\n") == "empty"
    assert _reason(records.csv_, b"a,b\nx,y") == "no text column; it has a, b: choose with --text-column"


def test_lines_are_put_together_from_pieces() -> None:
    assert list(records._split(["a", "b\nc", "", "d\n", "\ne"])) == ["ab\n", "cd\n", "\n", "e"]


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), out, row_group_size=300)
    return out.getvalue()


def _arrow(rows: list[dict[str, Any]], writer: str) -> bytes:
    pyarrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    table, out = pyarrow.Table.from_pylist(rows), io.BytesIO()
    with getattr(ipc, writer)(out, table.schema) as file:
        file.write_table(table, max_chunksize=400)
    return out.getvalue()


def test_parquet_and_arrow() -> None:
    rows = [{"id": number, "text": f"document {number} 日本"} for number in range(1000)]
    expected = [row["text"] for row in rows]
    assert _texts(records.parquet, _parquet(rows)) == expected
    assert (
        _texts(records.arrow, _arrow(rows, "new_file")) == _texts(records.arrow, _arrow(rows, "new_stream")) == expected
    )
    assert _texts(records.parquet, _parquet(rows), "{id}. {text}")[7] == "7. document 7 日本"
    assert _texts(records.parquet, _parquet([{"id": 1, "body": "words"}])) == ["words"]
    assert _reason(records.parquet, _parquet(rows), "body").startswith("no column body; it has ")
    chat = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}]
    assert [part.learn for part in records.parquet(io.BytesIO(_parquet(chat)))] == [False, True]


def test_broken_parquet_and_arrow_are_unreadable() -> None:
    rows = [{"text": f"document {number}" * 3} for number in range(200)]
    files = [
        (records.parquet, _parquet(rows)),
        (records.arrow, _arrow(rows, "new_file")),
        (records.arrow, _arrow(rows, "new_stream")),
    ]
    assert _reason(records.parquet, b"PAR1 nothing PAR1") == "broken Parquet"
    assert _reason(records.arrow, b"ARROW1 nothing") == "broken Arrow"
    for read, data in files:
        for damaged in _damaged(data, 25):
            _survives(lambda damaged=damaged, read=read: _texts(read, damaged))  # type: ignore[misc]


def test_without_libraries_a_person_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for read in (records.parquet, records.arrow):
        with pytest.raises(Unreadable, match=r"pip install '.*\[datasets\]'"):
            list(read(io.BytesIO(b"x")))
    with pytest.raises(Unreadable, match=r"pip install '.*\[documents\]'"):
        list(packed.unpack(io.BytesIO(b"x"), "a.zst"))


def _damaged(data: bytes, count: int) -> Iterator[bytes]:
    generator = random.Random(0)
    for _ in range(count):
        yield data[: generator.randrange(len(data))]
        flipped = bytearray(data)
        for _ in range(generator.randrange(1, 5)):
            flipped[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        yield bytes(flipped)


def _survives(work: Callable[[], object]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
    except Unreadable:
        pass


def test_damaged_records_are_text_or_unreadable() -> None:
    data = _lines({"text": "日本", "n": [1, {"a": None}]}, {"messages": [{"role": "user", "content": "x"}]})
    for read in (records.jsonl, records.json_, records.csv_, records.tsv):
        for damaged in _damaged(data, 40):
            _survives(lambda damaged=damaged, read=read: _texts(read, damaged))  # type: ignore[misc]


def _zip(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def _tar(members: dict[str, bytes], mode: str = "w", **kinds: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for name, kind in kinds.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    return out.getvalue()


def _zst(data: bytes) -> bytes:
    compressed: bytes = pytest.importorskip("zstandard").ZstdCompressor().compress(data)
    return compressed


def _unpacked(data: bytes, name: str) -> list[tuple[str, bytes | str]]:
    found: list[tuple[str, bytes | str]] = []
    for inner, content in packed.unpack(io.BytesIO(data), name):
        found.append((inner, content if isinstance(content, str) else content.read()))
        if not isinstance(content, str):
            assert content.seek(0) == 0
    return found


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": _zst,
}


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_files(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "SPOOL_BYTES", 1000)  # the second goes to disk
    pack = PACKERS[suffix]
    kind = packed.COMPRESSED[suffix]
    for data in (b"", b"some text" * 9, random.Random(0).randbytes(20_000)):
        assert _unpacked(pack(data), f"folder/a.jsonl{suffix}") == [("a.jsonl", data)]
    assert _unpacked(pack(b"one ") + b"\0" * 8 + pack(b"two") + b"\0" * 5000, f"a{suffix.upper()}") == [
        ("a", b"one two")
    ]
    assert _unpacked(pack(pack(b"x")), f"a.gz{suffix}") == [("a.gz", "compressed twice")]
    for broken in (pack(b"some text")[:-1], pack(b"some text") + b"garbage", b"garbage"):
        assert _reason(packed.unpack, broken, f"a{suffix}") == f"broken {kind}"
    assert _unpacked(pack(_tar({"b": b"2", "a": b"1"})), f"x.tar{suffix}") == [("a", b"1"), ("b", b"2")]


def test_names_of_packed_files() -> None:
    assert [packed.is_packed(name) for name in ("a.gz", "A.ZIP", "b.tgz", "c.tar.zst", "d.txt", "e.docx", "gz")] == [
        True
    ] * 4 + [False] * 3
    assert [packed.is_archive(name) for name in ("a.gz", "a.zip", "b.tgz", "c.tar.zst", "a.zip.gz")] == [False] + [
        True
    ] * 4
    assert [packed.inner_name(name) for name in ("f/a.txt.gz", "b.tgz", "c.zip", "d.txt")] == [
        "f/a.txt",
        "b.tar",
        "c.zip",
        "d.txt",
    ]


@pytest.mark.parametrize("pack", [_zip, _tar])
def test_members_come_sorted_and_hidden_ones_not_at_all(pack: Callable[[dict[str, bytes]], bytes]) -> None:
    members = {
        "./b.txt": b"b", "../../a.txt": b"a", ".hidden": b"x", "f/.git/c": b"x", "__MACOSX/d": b"x", "/e/f.txt": b"f",
        "g.zip": _zip({"x": b"x"}), "g.tar.gz": b"", "g.tgz": b"", "h.txt.gz": gzip.compress(b"h"), "i.gz": b"broken",
    }  # fmt: skip
    nested = "an archive inside an archive"
    assert _unpacked(pack(members), "x.zip" if pack is _zip else "x.tar") == [
        ("a.txt", b"a"), ("b.txt", b"b"), ("e/f.txt", b"f"), ("g.tar.gz", nested), ("g.tgz", nested), ("g.zip", nested),
        ("h.txt", b"h"), ("i.gz", "broken gzip"),
    ]  # fmt: skip


def test_links_and_devices_in_tars_are_skipped() -> None:
    data = _tar(
        {"z": b"text"},
        "w:gz",
        a=tarfile.SYMTYPE,
        b=tarfile.LNKTYPE,
        c=tarfile.CHRTYPE,
        d=tarfile.DIRTYPE,
        e=tarfile.FIFOTYPE,
    )
    expected = [("a", "a link"), ("b", "a link"), ("c", "not a file"), ("e", "not a file"), ("z", b"text")]
    assert _unpacked(data, "x.tgz") == expected


def test_zip_members_that_cannot_be_read() -> None:
    data = _zip({"a": b"text", "b": b"text"}, zipfile.ZIP_STORED)
    first = data.index(b"PK\x01\x02")  # the table of contents
    encrypted = bytearray(data)
    encrypted[first + 8] |= 1
    assert _unpacked(bytes(encrypted), "x.zip") == [("a", "encrypted"), ("b", b"text")]
    unknown = bytearray(data)
    unknown[first + 10] = 97
    assert _unpacked(bytes(unknown), "x.zip") == [("a", "unknown compression"), ("b", b"text")]
    nameless = data.replace(b"\0a", b"\0\0")
    assert _unpacked(nameless, "x.zip") == [("b", b"text")]
    wrong = data.replace(b"text", b"test", 1)
    assert _unpacked(wrong, "x.zip") == [("a", "broken archive"), ("b", b"text")]
    assert _reason(packed.unpack, data[:-30], "x.zip") == "broken archive"
    assert _reason(packed.unpack, b"no tar", "x.tar") == "broken archive"


def test_bombs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "FREE_BYTES", 2**20)
    zeros = bytes(2**23)
    for suffix, pack in PACKERS.items():
        assert _reason(packed.unpack, pack(zeros), f"a{suffix}") == "unpacks to too much"
    assert _reason(packed.unpack, _zip({"a": zeros}), "a.zip") == "unpacks to too much"
    assert _reason(packed.unpack, _zip({str(n): zeros[: 2**18] for n in range(50)}), "a.zip") == "unpacks to too much"
    assert _reason(packed.unpack, _zip({"a.gz": gzip.compress(zeros)}), "a.zip") == "unpacks to too much"
    assert len(_unpacked(_zip({"a": zeros}, zipfile.ZIP_STORED), "a.zip")) == 1
    monkeypatch.setattr(packed, "MEMBER_BYTES", 100)
    assert _unpacked(_zip({"a": b"x" * 101, "b": b"x" * 100}), "a.zip") == [
        ("a", "unpacks to too much"),
        ("b", b"x" * 100),
    ]


def test_tables_are_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "TABLE_BYTES", 2**20)
    monkeypatch.setattr(packed, "READ_BYTES", 2**16)
    assert _reason(packed.unpack, _zip({f"{n:0>200}": b"" for n in range(6000)}), "a.zip") == "broken archive"
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 2**23
    assert _reason(packed.unpack, header.tobuf() + bytes(2**23), "a.tar") == "broken archive"
    monkeypatch.setattr(packed, "MOST_MEMBERS", 2)
    assert _reason(packed.unpack, _tar({"a": b"", "b": b"", "c": b""}), "a.tar") == "too many members"


def test_unpacking_is_at_constant_memory() -> None:
    data = lzma.compress(b"".join(random.Random(n).randbytes(1000) * 20 for n in range(2000)))
    tracemalloc.start()
    for _, content in packed.unpack(io.BytesIO(data), "a.xz"):
        stream: BinaryIO = content  # type: ignore[assignment]
        assert stream.seek(0, io.SEEK_END) == 40_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5 * packed.SPOOL_BYTES  # BytesIO grows in steps


def test_damaged_archives_are_unreadable() -> None:
    members = {"a.txt": b"some text" * 20, "b.txt": random.Random(0).randbytes(300)}
    files = {
        "x.zip": _zip(members),
        "x.tar": _tar(members),
        "x.tar.xz": lzma.compress(_tar(members)),
        "x.gz": gzip.compress(members["a.txt"]),
    }
    files["x.bz2"], files["x.zst"] = bz2.compress(members["a.txt"]), _zst(members["a.txt"])
    for name, data in files.items():
        for damaged in _damaged(data, 60):
            _survives(lambda damaged=damaged, name=name: _unpacked(damaged, name))  # type: ignore[misc]


def test_a_file_without_a_document_notes_nothing_inside() -> None:
    """It is skipped as a whole, or read as text."""
    notes: list[str] = []
    with pytest.raises(Unreadable, match="no text column"):
        _texts(records.json_, b'{"setting": 3, "b": [1, 2]}', None, notes.append)
    assert notes == []
    _texts(records.jsonl, b'{"setting": 3}\n{"text": "a"}\n', None, notes.append)
    assert notes == ["no text column"]
