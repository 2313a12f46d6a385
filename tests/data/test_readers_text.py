"""Plain text: every encoding, every reason to refuse, and pieces that lose nothing where they are cut."""

from __future__ import annotations

import codecs
import io
import random
import tracemalloc

import pytest

from mambakit.data.documents import Unreadable
from mambakit.data.readers import encodings, names, text

RUSSIAN = "Старая мельница стояла у реки и уже много лет не работала. Дети часто приходили туда ловить рыбу.\n"
FRENCH = "Le château était situé près de la forêt, où l’été dernier les élèves avaient joué. Ça coûte 5 €.\n"
SPANISH = (
    "El viejo molino estaba cerca del río y hacía muchos años que no funcionaba. Los niños iban allí a pescar; "
    "¿quién podía decirles que no? ¡Nadie! Mañana será otro día.\n"
)
POLISH = "W pobliżu rzeki stał stary młyn, który od wielu lat nie pracował. Dzieci przychodziły łowić ryby.\n"
JAPANESE = "これは日本語の文章です。文字コードの判定を確かめるために書かれました。漢字とカタカナが含まれます。\n"
SIMPLE = "这是一段用来检查编码识别的中文文字。它有几个句子，也有标点符号。一二三。\n"
TRADITIONAL = "這是一段用來檢查編碼識別的中文文字。它有幾個句子，也有標點符號。\n"
KOREAN = "이것은 인코딩 판별을 확인하기 위한 한국어 문장입니다. 물가에 오래된 방앗간이 있었습니다.\n"
ENGLISH = "The old mill stood by the river.\n"


def _decoded(data: bytes) -> str:
    return "".join(part.text for part in text.read(io.BytesIO(data)))


def _reason(data: bytes) -> str:
    with pytest.raises(Unreadable) as caught:
        _decoded(data)
    return str(caught.value)


@pytest.mark.parametrize(
    ("encoding", "sentence"),
    [
        *[(encoding, RUSSIAN) for encoding in ("cp1251", "koi8_r", "cp866", "iso8859_5", "mac_cyrillic")],
        ("cp1252", FRENCH), ("cp1252", SPANISH), ("cp1250", POLISH), ("shift_jis", JAPANESE), ("euc_jp", JAPANESE),
        ("gb18030", SIMPLE), ("big5", TRADITIONAL), ("euc_kr", KOREAN), ("utf-8", JAPANESE), ("utf-8-sig", FRENCH),
        *[(encoding, sentence) for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
          for sentence in (ENGLISH, RUSSIAN, SIMPLE, JAPANESE)],
    ],
)  # fmt: skip
def test_encodings(encoding: str, sentence: str) -> None:
    assert _decoded((sentence * 5).encode(encoding)) == sentence * 5


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_the_order_of_bytes_is_seen_without_a_mark(encoding: str) -> None:
    for content in ("plain words", "一二三四五六七八九十，一百 " * 9):  # 一 has a zero byte, too: U+4E00
        assert _decoded(content.encode(encoding)) == content


def test_utf16_in_the_other_order_with_a_mark() -> None:
    assert _decoded(codecs.BOM_UTF16_BE + RUSSIAN.encode("utf-16-be")) == RUSSIAN


def test_a_file_may_name_its_encoding() -> None:
    hungarian = 'title="A hétvégi főzőverseny" régi űrhajó'
    data = f'<?xml version="1.0" encoding="windows-1250"?>\n{hungarian}'.encode("cp1250")
    assert _decoded(data).endswith(hungarian)
    wrong = f'<meta charset="no-such"><meta charset="x">\n{RUSSIAN * 3}'.encode("cp1251")
    assert _decoded(wrong).endswith(RUSSIAN)
    untrue = f'<?xml encoding="euc-jp"?>\n{RUSSIAN * 3}'.encode("cp1251")
    assert _decoded(untrue).endswith(RUSSIAN)


def test_what_is_not_ascii_may_come_late() -> None:
    late = ENGLISH * 70_000 + RUSSIAN * 3
    assert len(late) > 2 * encodings.SAMPLE_BYTES
    assert _decoded(late.encode("cp1251")) == late
    assert _decoded(late.encode("utf-8")) == late


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"), (b" \r\n\t", "empty"), (b"\xef\xbb\xbf", "empty"), ("\n ".encode("utf-16"), "empty"),
        (random.Random(0).randbytes(5000), "binary"), (b"\x7fELF\x02\x01" + bytes(60), "binary"),
        (ENGLISH.encode("utf-16") + b"x", "unknown encoding"),
        (random.Random(1).randbytes(5000).replace(b"\0", b""), "unknown encoding"),
        (RUSSIAN.encode()[:-5], "damaged UTF-8"), (RUSSIAN.encode() + b"\xff" + JAPANESE.encode(), "damaged UTF-8"),
    ],
)  # fmt: skip
def test_reasons(data: bytes, reason: str) -> None:
    assert _reason(data) == reason


def test_few_nuls_are_dropped_and_other_controls_stay() -> None:
    assert _decoded(ENGLISH.encode() * 5 + b"\0\0") == ENGLISH * 5
    assert _decoded(b"\x1b[2Jup\x08 \x0cdown\x1a") == "\x1b[2Jup\x08 \x0cdown\x1a"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-be", "gb18030", "cp932"])
@pytest.mark.parametrize("shift", range(4))
def test_nothing_is_lost_where_pieces_are_cut(encoding: str, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "READ_BYTES", 7)
    content = "a" * shift + "日本\r\n漢字\r\r\n\r文\n" * 20 + "\r"
    parts = list(text.read(io.BytesIO(content.encode(encoding))))
    assert "".join(part.text for part in parts) == content.replace("\r\n", "\n").replace("\r", "\n")
    assert len(parts) > 10
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
    assert all(part.text and part.learn for part in parts)


def test_a_long_line_is_read_at_constant_memory() -> None:
    stream = io.BytesIO("длинная строка ".encode() * 200_000)
    assert len(stream.getbuffer()) > 5_000_000
    tracemalloc.start()
    lengths = [len(part.text) for part in text.read(stream)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(lengths) == 15 * 200_000
    assert max(lengths) <= encodings.PIECE_CHARACTERS
    assert peak < 3_500_000  # the sample, and a few pieces


def test_any_bytes_are_text_or_unreadable() -> None:
    generator = random.Random(0)
    sources = [
        ENGLISH.encode("utf-16"),
        RUSSIAN.encode(),
        JAPANESE.encode("euc_jp"),
        ENGLISH.encode("utf-32"),
        b"\0" * 9,
    ]
    for _ in range(150):
        data = bytearray(generator.choice(sources))
        for _ in range(generator.randrange(4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            decoded = _decoded(bytes(data[: generator.randrange(len(data) + 1)]))
        except Unreadable:
            continue
        decoded.encode()


def test_names() -> None:
    kinds = {
        "Python": "src/a.PY", "Markdown": "a.md", "C++": "a.c++", "Make": "Makefile", "CMake": "CMakeLists.txt",
        "Rust": "a.rs", "LaTeX": "a.tex", "YAML": "b/c.yaml",
    }  # fmt: skip
    assert {names.kind_of(name): name for name in kinds.values()} == kinds
    assert {names.kind_of(name) for name in ("a.unheard", "README", "LICENSE", ".env", "a.zip")} == {"text"}
