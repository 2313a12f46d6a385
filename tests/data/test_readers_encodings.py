"""Encodings: the same answer for every format that is text, and no text where there is none."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mambakit.data.documents import TextPart, Unreadable
from mambakit.data.readers import encodings, html, notebook, packed, records, text, xml

from .languages import PAIRS, SENTENCES

pytest.importorskip("selectolax")
pytest.importorskip("lxml")

RUSSIAN, FRENCH, JAPANESE, KOREAN = (SENTENCES[name] for name in ("Russian", "French", "Japanese", "Korean"))
Read = Callable[..., Iterator[TextPart]]


def _text(read: Read, data: bytes) -> str:
    return "".join(part.text for part in read(io.BytesIO(data)))


def _reason(read: Read, data: bytes) -> str:
    with pytest.raises(Unreadable) as caught:
        list(read(io.BytesIO(data)))
    return str(caught.value)


def _page(sentences: str, head: str = "") -> str:
    """HTML whose text is these sentences, and that has more of tags than of text."""
    paragraphs = "".join(
        f'<div class="entry entry-text"><p class="paragraph" id="p{number}" title="no. {number}">{line}</p></div>\n'
        for number, line in enumerate(sentences.splitlines())
    )
    return f"<html><head>{head}<style>p {{ color: red }}</style><script>go('x');</script></head><body>{paragraphs}"


def _shown(sentences: str) -> str:
    """What `html.read` makes of such a page."""
    return "\n\n".join(html.SPACE.sub(" ", line) for line in sentences.splitlines())


@pytest.mark.parametrize(("language", "encoding"), PAIRS)
def test_text_without_a_word_of_its_encoding(language: str, encoding: str) -> None:
    sentences = SENTENCES[language]
    assert _text(text.read, sentences.encode(encoding)) == sentences


@pytest.mark.parametrize(("language", "encoding"), PAIRS)
def test_html_without_a_word_of_its_encoding(language: str, encoding: str) -> None:
    sentences = SENTENCES[language]
    assert _text(html.read, _page(sentences).encode(encoding)) == _shown(sentences)


@pytest.mark.parametrize(("language", "encoding"), PAIRS)
def test_xml_without_a_declaration(language: str, encoding: str) -> None:
    sentences = SENTENCES[language]
    lines = [html.SPACE.sub(" ", line) for line in sentences.splitlines()]
    data = "<book>" + "".join(f"<line>{line}</line>\n" for line in lines) + "</book>"
    assert _text(xml.read, data.encode(encoding)) == "\n".join(lines)


@pytest.mark.parametrize(("language", "encoding"), PAIRS)
def test_json_and_csv(language: str, encoding: str) -> None:
    if encoding.startswith("iso2022"):
        pytest.skip("JSON has no escape characters")
    sentences = SENTENCES[language]
    lines = [json.dumps({"text": line}, ensure_ascii=False) for line in sentences.splitlines()]
    for read, data in (
        (records.jsonl, "\n".join(lines)),
        (records.json_, f"[{','.join(lines)}]"),
        (records.json_, "\n".join(lines)),
    ):
        assert [part.text for part in read(io.BytesIO(data.encode(encoding)))] == sentences.splitlines()
    table = "text\n" + "".join(f'"{line}"\n' for line in sentences.splitlines())
    assert [part.text for part in records.csv_(io.BytesIO(table.encode(encoding)))] == sentences.splitlines()


@pytest.mark.parametrize(
    ("label", "encoding", "language"),
    [
        ("x-sjis", "cp932", "Japanese"), ("Windows-31J", "cp932", "Japanese"), ("Shift_JIS", "cp932", "Japanese"),
        ("iso-2022-jp", "iso2022_jp", "Japanese"), ("johab", "johab", "Korean"), ("iso-2022-kr", "iso2022_kr", "Korean"),
        ("x-cp1251", "cp1251", "Russian"), ("windows-874", "cp874", "Thai"), ("iso-8859-8-i", "iso8859_8", "Hebrew"),
        ("hz-gb-2312", "hz", "Chinese"), ("iso-8859-9", "cp1254", "Turkish"), ("KOI8-R", "koi8_r", "Russian"),
    ],
)  # fmt: skip
def test_declared_by_a_name_that_browsers_know(label: str, encoding: str, language: str) -> None:
    sentences = SENTENCES[language]
    page = _page(sentences, f'<meta http-equiv="Content-Type" content="text/html; charset={label}">')
    assert _text(html.read, page.encode(encoding)) == _shown(sentences)
    line = html.SPACE.sub(" ", sentences.splitlines()[0])
    data = f'<?xml version="1.0" encoding="{label}"?><a><b>{line}</b></a>'
    assert _text(xml.read, data.encode(encoding)) == line


@pytest.mark.parametrize(
    ("declared", "encoding", "language"),
    [
        ("utf-8", "cp1251", "Russian"), ("utf-8", "cp1252", "French"), ("iso-8859-1", "utf-8", "French"),
        ("windows-1252", "utf-8", "Russian"), ("gb2312", "utf-8", "Japanese"), ("iso-8859-1", "utf-16", "Greek"),
        ("utf-16", "utf-8", "Czech"), ("euc-jp", "cp932", "Japanese"), ("big5", "koi8-r", "Russian"), ("nonsense", "cp1253", "Greek"),
    ],
)  # fmt: skip
def test_a_declaration_that_is_not_true(declared: str, encoding: str, language: str) -> None:
    sentences = SENTENCES[language]
    page = _page(sentences, f"<meta charset={declared}>")
    assert _text(html.read, page.encode(encoding)) == _shown(sentences)
    line = html.SPACE.sub(" ", sentences.splitlines()[0])
    data = f'<?xml version="1.0" encoding="{declared}"?><a><b>{line}</b></a>'
    assert _text(xml.read, data.encode(encoding)) == line


def test_a_declaration_is_followed_where_the_bytes_are_utf8_by_chance() -> None:
    assert (
        _text(html.read, b"<meta charset=windows-1252><p>" + "BEYONCÉ’S CAFÉ’S".encode("cp1252")) == "BEYONCÉ’S CAFÉ’S"
    )


def test_slight_damage_of_markup_costs_the_damaged_characters() -> None:
    for encoding, bad in (("utf-8", b"\xff"), ("gb18030", b"\xff"), ("euc-jp", b"\xff")):
        sentences = SENTENCES["Japanese" if encoding == "euc-jp" else "Chinese"]
        head = f"<meta charset={encoding}>"
        data = _page(sentences, head).encode(encoding).replace(b"</p>", bad + b"</p>", 1)
        first, second = _text(html.read, data).split("\n\n")
        assert first.rstrip("\ufffd") == _shown(sentences).split("\n\n")[0] and first.endswith("\ufffd")
        assert second == _shown(sentences).split("\n\n")[1]
    undeclared = _page(RUSSIAN).encode().replace(b"</p>", b"\xd0</p>", 1)
    assert _text(html.read, undeclared) == _shown(RUSSIAN).replace("\n\n", "\ufffd\n\n", 1)


def test_what_is_utf8_stays_as_it_is() -> None:
    everything = "".join(
        chr(code) for code in range(1, 0x3000, 7) if not 0xD800 <= code < 0xE000 and chr(code) not in "\r\x1b"
    )
    assert _text(text.read, everything.encode()) == everything
    for page in (
        "<p>plain",
        "<meta charset=windows-1251><p>plain",
        _page(RUSSIAN),
        _page(JAPANESE, "<meta charset=utf-8>"),
    ):
        assert html.decode(page.encode()) == page
        assert html.decode(page.encode("utf-8-sig")) == page
    declares = "# -*- coding: koi8-r -*-\n# charset=windows-1251\n" + FRENCH
    assert _text(text.read, declares.encode()) == declares


def test_escapes_of_a_terminal_are_text() -> None:
    for content in ("\x1b[2J\x1b(0lqqk\x1b(B", "price: \x1b$5", "\x1b$B is how it begins", "PS1='\x1b]0;$PWD'"):
        assert _text(text.read, content.encode()) == content


def test_escapes_of_iso_2022_may_come_late_and_lie_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    late = "plain words\n" * 100_000 + JAPANESE
    assert _text(text.read, late.encode("iso2022_jp")) == late
    for size in range(20, 60):
        monkeypatch.setattr(encodings, "READ_BYTES", size)
        assert _text(text.read, JAPANESE.encode("iso2022_jp")) == JAPANESE


def test_iso_2022_that_python_does_not_know_is_not_read_as_ascii() -> None:
    chinese = b"\x1b$)A\x0e" + SENTENCES["Chinese"].encode("gb2312").translate(bytes(range(128)) * 2) + b"\x0f\n"
    assert _reason(text.read, chinese) == "unknown encoding"


@pytest.mark.parametrize("language", ["Japanese", "Korean", "Chinese", "Thai"])
@pytest.mark.parametrize("newline", ["\n", ""])
def test_a_sample_does_not_end_inside_a_character(language: str, newline: str) -> None:
    encoding = {"Japanese": "cp932", "Korean": "johab", "Chinese": "gb18030", "Thai": "cp874"}[language]
    unit = SENTENCES[language].replace("\n", newline)
    for shift in range(3):
        content = "x" * shift + unit * (2 * encodings.SAMPLE_BYTES // len(unit.encode(encoding)) + 1)
        assert _text(text.read, content.encode(encoding)) == content


def test_what_is_not_ascii_may_lie_in_one_long_line() -> None:
    before, after = "x" * (4 * encodings.READ_BYTES), "\nplain\n"
    for content in (before + RUSSIAN.replace("\n", "") + after, before + after + RUSSIAN + before):
        assert _text(text.read, content.encode("cp1251")) == content
        assert _text(html.read, b"<p>" + content.encode("cp1251")) == " ".join(content.split())


@pytest.mark.parametrize(
    "words", ["£825", "café", "El Niño", "5 €", "¿Qué?", "20 °C", "½ cup", "Ærø", "© 2003 Smith", "It’s “fine”", "São Paulo", "Zürich", "Straße"]
)  # fmt: skip
def test_few_signs_are_western(words: str) -> None:
    for content in (words, f"{words} and some English words around it, as there often are on a page."):
        assert _text(text.read, content.encode("cp1252")) == content
        assert _text(html.read, f"<p>{content}".encode("cp1252")) == content.replace("\xa0", " ")


@pytest.mark.parametrize(
    ("language", "encoding"),
    [("French", "cp500"), ("French", "hp-roman8"), ("Arabic", "cp720"), ("Turkish", "mac-turkish"), ("Polish", "mac-latin2"), ("Greek", "cp869")],
)  # fmt: skip
def test_what_cannot_be_told_is_skipped(language: str, encoding: str) -> None:
    data = SENTENCES[language].encode(encoding, "ignore")
    assert _reason(text.read, data) == "unknown encoding"
    data = b"<p>" + data.replace(b"<", b"") + b"</p>"
    assert _reason(html.read, data) in ("unknown encoding", "binary")


def test_signs_are_no_reason_to_skip() -> None:
    for line in ("about 20 µm, 3 ² and 4 ÷ 5 ¬ 6 ¦ 7\n", "§ 5: 10 µm ± 3 °C, © 2003 ®\n"):
        assert _text(text.read, (line * 20).encode("cp1252")) == line * 20


def test_plain_text_that_says_what_it_cannot_be_is_not_believed() -> None:
    for says in ("cp037", "cp500", "iso-8859-1", "no-such", "utf-8"):
        content = f"# coding: {says}\n{RUSSIAN}"
        assert _text(text.read, content.encode("koi8-r")) == content


def test_noise_is_no_text_in_any_format() -> None:
    noise = random.Random(3).randbytes(20_000)
    for read in (text.read, html.read, xml.read, records.csv_, records.json_, records.jsonl, notebook.read):
        assert _reason(read, noise)
        assert _reason(read, noise.replace(b"\0", b""))


def test_a_mark_alone_is_an_empty_file() -> None:
    for mark in (b"\xef\xbb\xbf", *itertools.chain(*encodings.MARKS.values())):
        for read, reason in (
            (text.read, "empty"),
            (records.csv_, "empty"),
            (records.json_, "empty"),
            (html.read, "no text"),
        ):
            assert _reason(read, mark) == reason


def test_unicode_with_and_without_a_mark_in_every_format() -> None:
    lines = [json.dumps({"text": line}, ensure_ascii=False) for line in RUSSIAN.splitlines()]
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
        assert _text(html.read, _page(RUSSIAN).encode(encoding)) == _shown(RUSSIAN)
        for read, data in (
            (records.csv_, "text\n" + RUSSIAN.replace(",", "")),
            (records.json_, "\n".join(lines)),
            (records.jsonl, "\n".join(lines)),
            (records.json_, f"[{','.join(lines)}]"),
        ):
            wanted = [line.replace(",", "") if read is records.csv_ else line for line in RUSSIAN.splitlines()]
            assert [part.text for part in read(io.BytesIO(data.encode(encoding)))] == wanted


def test_json_lines_that_are_unpacked_on_the_way_are_judged_by_their_beginning() -> None:
    data = "".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in RUSSIAN.splitlines() * 2_000)
    for encoding in ("utf-8", "cp1251", "koi8-r"):
        stream = packed.stream(io.BytesIO(gzip.compress(data.encode(encoding))), "x.jsonl.gz")
        assert [part.text for part in records.jsonl(stream)] == RUSSIAN.splitlines() * 2_000


def _notebook(nbformat: int, *cells: dict[str, Any]) -> bytes:
    inside = {"cells": cells} if nbformat >= 4 else {"worksheets": [{"cells": cells}]}
    return json.dumps({"nbformat": nbformat, **inside}, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("nbformat", "lines", "wanted"),
    [
        (2, ["import os", "", "x = 1"], "import os\n\nx = 1"), (2, ["import os\n", "x = 1"], "import os\nx = 1"),
        (2, "import os\nx = 1", "import os\nx = 1"), (2, ["one line"], "one line"), (2, [], ""),
        (3, ["import os\n", "\n", "x = 1"], "import os\n\nx = 1"), (3, ["import os", "x = 1"], "import os\nx = 1"),
        (4, ["import os\n", "x = 1"], "import os\nx = 1"), (4, ["import ", "os"], "import os"),
    ],
)  # fmt: skip
def test_lines_of_a_notebook_are_joined_as_its_format_has_them(nbformat: int, lines: Any, wanted: str) -> None:
    code = {"cell_type": "code", ("source" if nbformat >= 4 else "input"): lines}
    data = _notebook(nbformat, code, {"cell_type": "markdown", "source": "end"})
    assert _text(notebook.read, data) == f"{wanted}\n\nend".lstrip("\n")


def test_a_notebook_in_another_encoding() -> None:
    data = _notebook(4, {"cell_type": "markdown", "source": RUSSIAN}).decode()
    for encoding in ("utf-8-sig", "utf-16", "cp1251"):
        assert _text(notebook.read, data.encode(encoding)) == RUSSIAN.strip("\n")


def test_a_notebook_whose_encoding_looks_like_ascii() -> None:
    words = "すべての人間は、生れながらにして自由であり、かつ、尊厳と権利とについて平等である。" * 4
    data = _notebook(4, {"cell_type": "markdown", "source": words}).decode()
    for encoding in ("iso-2022-jp", "shift_jis", "euc-jp"):
        assert _text(notebook.read, data.encode(encoding)) == words
