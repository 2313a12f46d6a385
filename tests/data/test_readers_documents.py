"""Documents in formats of their own: what text comes out, why none does, and that nothing else is ever raised."""

from __future__ import annotations

import builtins
import io
import json
import random
import sys
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mambakit.data.documents import TextPart, Unreadable
from mambakit.data.readers import epub, html, notebook, pdf, word, xml

pytest.importorskip("pypdfium2")
pytest.importorskip("selectolax")
pytest.importorskip("lxml")


def parts_of(reader: object, data: bytes) -> list[TextPart]:
    return list(reader.read(io.BytesIO(data)))  # type: ignore[attr-defined]


def text_of(reader: object, data: bytes) -> str:
    parts = parts_of(reader, data)
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
    return "".join(part.text for part in parts)


def reason_of(reader: object, data: bytes) -> str:
    with pytest.raises(Unreadable) as error:
        parts_of(reader, data)
    return str(error.value)


# --- files ---


def make_pdf(*pages: str, encrypt: bool = False, rotate: int = 0) -> bytes:
    """A PDF whose pages have these content streams, in Helvetica as F1."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for number, content in enumerate(pages):
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Rotate {rotate} /Contents {5 + 2 * number} 0 R"
            " /Resources << /Font << /F1 3 0 R >> >> >>",
            f"<< /Length {len(content.encode('cp1252'))} >>\nstream\n{content}\nendstream",
        ]
    data, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n".encode("cp1252")
    start = len(data)
    data += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    data += b"".join(f"{place:010} 00000 n \n".encode() for place in places)
    lock = f"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{'ab' * 32}> /U <{'cd' * 32}> >> /ID [<00> <00>]"
    data += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R {lock if encrypt else ''} >>\n".encode()
    return data + f"startxref\n{start}\n%%EOF\n".encode()


def shown(*lines: tuple[float, float, str], size: float = 10) -> str:
    """A content stream that shows each text at its place."""
    return "".join(f"BT /F1 {size} Tf {x} {y} Td ({text}) Tj ET\n" for x, y, text in lines)


def column(x: float, top: float, *lines: str) -> list[tuple[float, float, str]]:
    return [(x, top - 12 * number, line) for number, line in enumerate(lines)]


def make_zip(files: Mapping[str, str | bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return out.getvalue()


WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def make_docx(body: str, **more: str | bytes) -> bytes:
    document = f'<w:document xmlns:w="{WORD}" xmlns:mc="http://m"><w:body>{body}</w:body></w:document>'
    return make_zip({"word/document.xml": document, **{f"word/{name}.xml": text for name, text in more.items()}})


def paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"


def make_epub(chapters: Mapping[str, str | bytes], spine: list[str], **more: str | bytes) -> bytes:
    items = "".join(
        f'<item id="{name}" href="text/{name}.xhtml" media-type="application/xhtml+xml"/>' for name in chapters
    )
    refs = "".join(f'<itemref idref="{name}"/>' for name in spine)
    return make_zip({
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": '<container xmlns="urn:c"><rootfiles><rootfile full-path="OPS/book.opf"/></rootfiles></container>',
        "OPS/book.opf": f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{refs}</spine></package>',
        **{f"OPS/text/{name}.xhtml": text for name, text in chapters.items()},
        **{f"META-INF/{name}.xml": text for name, text in more.items()},
    })  # fmt: skip


def make_notebook(*cells: Mapping[str, object], **more: object) -> bytes:
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells, **more}).encode()


PROSE = ["A language model learns to fore-", "see what comes next, one token", "at a time, and no more."]
SAMPLES: dict[str, tuple[object, bytes]] = {
    "pdf": (pdf, make_pdf(shown(*column(72, 700, *PROSE)), shown((72, 700, "Second page")))),
    "html": (html, "<html><head><meta charset=utf-8><title>T</title><body><h1>H</h1><table><tr><td>ä<td>b</table>".encode()),
    "xml": (xml, "<?xml version='1.0' encoding='utf-8'?><!DOCTYPE a><a><b>Tä <i>x</i></b><c>y&amp;</c></a>".encode()),
    "docx": (word, make_docx(paragraph("One") + paragraph("Two"), footnotes=f'<w:footnotes xmlns:w="{WORD}"/>')),
    "epub": (epub, make_epub({"a": "<p>One", "b": "<p>Two"}, ["a", "b"], encryption="<encryption/>")),
    "notebook": (notebook, make_notebook({"cell_type": "markdown", "source": ["a\n", "b"]})),
}  # fmt: skip


# --- PDF ---


def test_pdf_lines_of_a_paragraph_are_joined_and_split_words_made_whole() -> None:
    page = shown(*column(72, 700, *PROSE), (72, 640, "A new paragraph."))
    joined = "A language model learns to foresee what comes next, one token at a time, and no more."
    assert text_of(pdf, make_pdf(page)) == f"{joined}\n\nA new paragraph."


def test_pdf_hyphens_stay_where_no_word_was_split() -> None:
    page = shown(*column(72, 700, "It was translated for the non-", "English reader, and in the year", "of grace."))
    assert text_of(pdf, make_pdf(page)) == "It was translated for the non-English reader, and in the year of grace."


def test_pdf_pages_are_parts_with_a_blank_line_between() -> None:
    data = make_pdf(shown((72, 700, "One")), "", shown((72, 700, "Two")))
    assert parts_of(pdf, data) == [TextPart("One\n\n", ends=False), TextPart("Two")]


def test_pdf_columns_are_read_one_after_the_other_though_the_file_goes_across() -> None:
    left = [f"the left column has line {number}" for number in range(8)]
    right = [f"and the right one has row {number}" for number in range(8)]
    rows = [
        row
        for pair in zip(column(72, 700, *left), column(320, 700, *right), strict=True)
        for row in pair
    ]  # fmt: skip
    text = text_of(pdf, make_pdf(shown(*rows))).replace("\n", " ")
    assert text.index("left column has line 7") < text.index("right one has row 0")


def test_pdf_rows_of_a_table_stay_rows() -> None:
    cells = [(72 + 150 * c, 700 - 12 * r, f"r{r}c{c}") for r in range(8) for c in range(3)]
    assert text_of(pdf, make_pdf(shown(*cells))).splitlines()[:2] == ["r0c0\tr0c1\tr0c2", "r1c0\tr1c1\tr1c2"]


def test_pdf_text_that_runs_upwards_is_read_along_its_lines() -> None:
    lines = "".join(f"BT /F1 10 Tf 0 1 -1 0 {100 + 12 * n} 72 Tm ({line}) Tj ET\n" for n, line in enumerate(PROSE))
    assert text_of(pdf, make_pdf(lines, rotate=90)).startswith("A language model learns to foresee what comes")


def test_pdf_characters_become_text() -> None:
    assert [pdf._character(code) for code in (0xFB01, 0xFB03, 0, 7, 2, 0xFFFE, 0xD800, 0x41)] == [
        "fi", "ffi", "", "", "-", "-", "\ufffd", "A",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (make_pdf("", ""), "no text layer"),
        (make_pdf("", encrypt=True), "encrypted"),
        (make_pdf("").replace(b"4 0 obj", b"9 0 obj"), "broken PDF"),
        (b"", "broken PDF"),
        (b"%PDF-1.4\nnonsense", "broken PDF"),
    ],
)
def test_pdf_without_text_says_why(data: bytes, reason: str) -> None:
    assert reason_of(pdf, data) == reason


def test_pdf_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "LARGEST_WORK", 2 * pdf.WORK_OF_PAGE + 20)
    assert reason_of(pdf, make_pdf(*[shown((72, 700, "twelve chars"))] * 3)) == "too large"


def test_pdf_work_is_limited_by_what_is_drawn_and_not_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_pdf(shown((72, 700, "First")), "0 0 m 1 1 l S\n" * 5_000, shown((72, 700, "Last")))
    assert text_of(pdf, data) == "First\n\nLast"
    monkeypatch.setattr(pdf, "LARGEST_WORK", 5_000)
    assert reason_of(pdf, data) == "too large"
    monkeypatch.undo()
    many = b" ".join([b"4 0 R"] * 2_000)
    data = make_pdf("0 0 m 1 1 l S\n" * 50).replace(b"/Kids [4 0 R] /Count 1", b"/Kids [" + many + b"] /Count 2000")
    assert reason_of(pdf, data) == "no text layer"
    monkeypatch.setattr(pdf, "LARGEST_WORK", 2_000 * pdf.WORK_OF_PAGE)
    assert reason_of(pdf, data) == "too large"


# --- HTML ---


def test_html_keeps_blocks_and_drops_what_is_not_seen() -> None:
    page = b"""<!doctype html><html><head><title>The  title</title><style>p{}</style></head><body>
    <script>x()</script><noscript>no</noscript><template>t</template><p hidden>h</p><p style="color: red; display: none">d</p>
    <h1>Head&shy;ing &amp; more</h1><p>One
    <b>para</b>graph&nbsp;here.<br>Next</p><p>Two</p>
    <ul><li>first<li>second <i>item</i></ul>
    <table><tr><th>a<th><p>b</p><tr><td><td>d</table>
    <pre>  kept
    as  is
</pre>end</body></html>"""
    assert text_of(html, page) == (
        "The title\n\nHead\u00ading & more\n\nOne paragraph here.\nNext\n\nTwo\n\nfirst\nsecond item\n\n"
        "a\tb\n\td\n\n  kept\n    as  is\n\n\nend"
    )


def test_html_cells_with_several_lines_do_not_stand_side_by_side() -> None:
    assert text_of(html, b"<table><tr><td><p>a</p><p>b</p><td>c</table>") == "a\n\nb\nc"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("<p>żółw".encode("utf-8-sig"), "żółw"),
        (b"\xff\xfe" + "<p>żółw".encode("utf-16-le"), "żółw"),
        ("<p>plain".encode("utf-16-be"), "plain"),
        (b"<meta charset=windows-1251><p>" + "Привет".encode("cp1251"), "Привет"),
        (b"<meta http-equiv=Content-Type content='text/html; charset=gb2312'><p>" + "你好".encode("gb2312"), "你好"),
        (b"<?xml version='1.0' encoding='Shift_JIS'?><p>" + "日本".encode("cp932"), "日本"),
        (b"<meta charset=unicode_escape><p>\\x41", "\\x41"),
        ("<p>naïve".encode(), "naïve"),
        ("<p>£825".encode("cp1252"), "£825"),
        ("<p>äöü".encode()[:-1], "äö\ufffd"),
    ],
)
def test_html_encodings(data: bytes, text: str) -> None:
    assert text_of(html, data) == text


def test_html_nesting_costs_neither_stack_nor_time() -> None:
    assert text_of(html, b"<b><i>" * 20_000 + b"deep") == "deep"
    assert text_of(html, b"<div>" * 5_000 + b"deep") == "deep"
    assert reason_of(html, b"<div>" * 300_000) == "nested too deep"
    assert reason_of(html, b"".join(b"<font a=%d>" % n for n in range(3_000)) + b"<p>x" * 3_000) == "nested too deep"


MANY = 100_000


@pytest.mark.parametrize(
    "page",
    [
        b"<p " + b" ".join(b"a%d" % number for number in range(MANY)) + b">x",
        b"<p " + b" ".join(b"a%d='>'" % number for number in range(MANY)) + b">x",
        b"<select>" + b"<option>x" * MANY,
        b"<foo>" * MANY + b"x</bar>" * MANY,
        b"<span>" * MANY + b"</p>" * MANY,
        b"<svg>" + b"<g>" * MANY + b"</x>" * MANY,
        b"<b>" * MANY + b"</i>" * MANY,
        b"".join(b"<b id=%d>" % number for number in range(MANY)),
        b"<!--><p " + b" ".join(b"a%d" % number for number in range(MANY)) + b">x-->",
    ],
    ids=range(9),
)
def test_html_that_would_take_minutes_is_refused(page: bytes) -> None:
    assert reason_of(html, page) == "nested too deep"


def test_html_that_is_only_large_is_read() -> None:
    script = "if (a<b && c) { d = e / f; }\n" * 20_000
    comment = "<!-- <p " + "a b c " * 50_000 + "> -->"
    cells = "<tr><td class=a id=b style='color: red'>cell</td></tr>" * 5_000
    page = f"<script>{script}</script>{comment}<table>{cells}</table>{'<p>words &lt; more</p>' * 5_000}"
    assert text_of(html, page.encode()).count("cell") == 5_000


def test_html_without_text_or_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason_of(html, b"<script>x</script>") == "no text"
    monkeypatch.setattr(html, "LARGEST_FILE", 10)
    assert reason_of(html, b"<p>12345678") == "too large"


# --- XML ---


def test_xml_lines_are_elements_with_text() -> None:
    data = b"""<book><head><title>A</title><by>B</by></head>
      <p><b>Bold</b> and
         <i>italic</i> text.</p><p><b>x</b> <i>y</i></p>
      <q>Verse<l>one</l><list><l>two</l><l>three</l></list>end</q><!-- no --><?no no?><r><![CDATA[ <raw> ]]></r></book>"""
    lines = ["A", "B", "Bold and italic text.", "x y", "Verseone", "two", "three", "end", "<raw>"]
    assert text_of(xml, data) == "\n".join(lines)


@pytest.mark.parametrize("encoding", ["big5", "euc-jp", "gb2312", "utf-16", "shift_jis"])
def test_xml_declared_encoding(encoding: str) -> None:
    data = f"<?xml version='1.0' encoding='{encoding}'?><a>日本</a>".encode(encoding)
    assert text_of(xml, data) == "日本"


@pytest.mark.parametrize(
    ("encoding", "text"), [("iso-8859-5", "Това"), ("windows-1250", "Török"), ("windows-1251", "Поп")]
)
def test_xml_declared_encoding_of_a_byte(encoding: str, text: str) -> None:
    assert text_of(xml, f"<?xml version='1.0' encoding='{encoding}'?><a>{text}</a>".encode(encoding)) == text


def test_xml_names_of_signs_are_known_without_a_dtd() -> None:
    data = b"<!DOCTYPE a SYSTEM 'nowhere.dtd'><a>caf&eacute; &lt;&#65;&amp;eacute;</a>"
    assert text_of(xml, data) == "café <A&eacute;"
    assert text_of(xml, b"<a>a\x00\x08b</a>") == "ab"
    padded = (
        b"<a>" + b"x" * (2 * xml.READ_BYTES - 6) + b"&eacute;" + b"x" * 99 + b"</a>"
    )  # a block ends inside the name
    assert text_of(xml, padded).endswith("xé" + "x" * 99)


def test_xml_entities_are_never_expanded() -> None:
    bomb = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 12))
    assert reason_of(xml, f'<!DOCTYPE a [<!ENTITY e0 "lol">{bomb}]><a>&e11;</a>'.encode()) == "entities inside XML"
    outside = b'<!DOCTYPE a [<!ENTITY e SYSTEM "file:///etc/passwd">]><a>&e;</a>'
    assert reason_of(xml, outside) == "entities inside XML"


def test_xml_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason_of(xml, b"") == "broken XML"
    assert reason_of(xml, b"<a>") == "broken XML"
    assert reason_of(xml, b"<a>&nothing;</a>") == "broken XML"
    assert reason_of(xml, b"<a><b/></a>") == "no text"
    assert reason_of(xml, b"<a>" * 100_000) == "nested too deep"
    monkeypatch.setattr(xml, "LARGEST_ELEMENT", 2**22)
    assert reason_of(xml, b"<a>" + b"<b>x</b>y" * 40_000) == "too large"  # text that has to stay together
    monkeypatch.setattr(xml, "LARGEST_TEXT", 2**20)
    assert reason_of(xml, b"<a>" + b"<b>%s</b>" % (b"x" * 5_000) * 1_000) == "too large"


def test_xml_comes_in_parts_that_make_up_the_whole() -> None:
    data = "<a><c>" + "".join(f"<b>line {n}</b>" for n in range(30_000)) + "</c></a>"
    assert len(parts_of(xml, data.encode())) > 2
    assert text_of(xml, data.encode()) == "\n".join(f"line {n}" for n in range(30_000))


def _lines_run(action: Callable[[], object]) -> int:
    """How many lines of Python an action runs: what it costs, whatever else the machine does."""
    count = 0

    def trace(frame: object, event: str, argument: object) -> Callable[..., Any]:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def test_xml_of_many_empty_elements_costs_no_more_than_their_number() -> None:
    def read(many: int) -> None:
        assert text_of(xml, b"<a>" + b"x<b/>" * many + b"</a>") == "x" * many

    read(10)  # what is done once
    assert _lines_run(lambda: read(2_000)) < 6 * _lines_run(lambda: read(500))  # 14 times, if each looked at all before


# --- Word ---


def test_docx_paragraphs_tables_and_notes() -> None:
    row = "<w:tr><w:tc>{}</w:tc><w:tc>{}</w:tc></w:tr>"
    body = (
        "<w:p><w:r><w:t xml:space='preserve'>One </w:t></w:r><w:del><w:r><w:delText>gone</w:delText></w:r></w:del>"
        "<w:r><w:instrText>PAGE</w:instrText><w:t>line</w:t><w:tab/><w:t>tab</w:t><w:br/><w:t>next</w:t></w:r></w:p>"
        "<w:p/><w:p/>"
        f"<w:tbl>{row.format(paragraph('a'), paragraph('b') + paragraph('c'))}{row.format('<w:p/>', paragraph('d'))}</w:tbl>"
        f"<w:p><w:r><mc:Choice>{paragraph('box')}</mc:Choice><mc:Fallback>{paragraph('box')}</mc:Fallback>"
        "<w:t>after</w:t></w:r></w:p>"
    )
    notes = f"<w:footnotes xmlns:w='{WORD}'><w:footnote w:type='separator'>{paragraph('-')}</w:footnote><w:footnote>{paragraph('Note.')}</w:footnote></w:footnotes>"
    expected = "One line\ttab\nnext\n\na\tb c\n\td\nbox\nafter\n\nNote."
    assert text_of(word, make_docx(body, footnotes=notes)) == expected


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (word.OLE + b"\0" * 600, "old Word format"),
        (word.OLE + b"\0" * 600 + "EncryptedPackage".encode("utf-16-le"), "encrypted"),
        (b"PK\x03\x04", "broken zip file"),
        (make_zip({"other.xml": "<a/>"}), "not a Word document"),
        (make_docx("<w:p/>"), "no text"),
        (make_docx("<w:p>"), "broken XML"),
        (make_docx("<w:sdt>" * 2_000), "nested too deep"),
    ],
)
def test_docx_that_cannot_be_read(data: bytes, reason: str) -> None:
    assert reason_of(word, data) == reason


def test_docx_zip_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word, "LARGEST_ENTRY", 2**20)
    data = make_docx(paragraph("A") + " " * 2**24)
    assert len(data) < 2**15 and reason_of(word, data) == "too large"


def test_docx_cell_of_many_paragraphs() -> None:
    many = 20_000
    cell = paragraph("word") * many
    data = make_docx(f"<w:tbl><w:tr><w:tc>{cell}</w:tc><w:tc>{paragraph('next')}</w:tc></w:tr></w:tbl>")
    assert text_of(word, data) == " ".join(["word"] * many) + "\tnext"


# --- EPUB ---


def test_epub_chapters_in_the_order_of_the_spine() -> None:
    chapters = {"one": "<html><body><h1>I</h1><p>First</p></body></html>", "two": "<p>Second</p>", "x": "<p>unused</p>"}
    data = make_epub(chapters, ["two", "one", "missing"])
    assert parts_of(epub, data) == [TextPart("Second\n\n", ends=False), TextPart("I\n\nFirst")]


def test_epub_with_locked_fonts_is_read_and_with_locked_chapters_is_not() -> None:
    lock = (
        "<encryption><EncryptedData><CipherData><CipherReference URI='{}'/></CipherData></EncryptedData></encryption>"
    )
    assert text_of(epub, make_epub({"a": "<p>A"}, ["a"], encryption=lock.format("OPS/font.otf"))) == "A"
    assert reason_of(epub, make_epub({"a": "<p>A"}, ["a"], encryption=lock.format("OPS/text/a.xhtml"))) == "encrypted"


def test_epub_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason_of(epub, b"PK") == "broken zip file"
    assert reason_of(epub, make_zip({"a": "b"})) == "not an EPUB"
    assert reason_of(epub, make_epub({"a": "<p>"}, ["a"])) == "no text"
    monkeypatch.setattr(epub, "LARGEST_ENTRY", 2**20)
    assert reason_of(epub, make_epub({"a": b"<p>" + b" " * 2**24}, ["a"])) == "too large"
    monkeypatch.setattr(epub, "LARGEST_BOOK", 2**10)
    assert reason_of(epub, make_epub({"a": "<p>" + "x" * 1000, "b": "<p>" + "x" * 1000}, ["a", "b"])) == "too large"


def test_epub_chapters_share_what_a_page_may_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    chapters = {name: "<div>" * 100 + name for name in "abc"}
    monkeypatch.setattr(epub, "LARGEST_COST", 12_000)  # a chapter costs 5,050
    parts = epub.read(io.BytesIO(make_epub(chapters, ["a", "b", "c"])))
    assert next(parts).text == "a\n\n"
    with pytest.raises(Unreadable, match="nested too deep"):
        next(parts)


# --- notebooks ---


def test_notebook_cells_without_their_outputs() -> None:
    cells: list[Mapping[str, object]] = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": "x = 1\n\n", "outputs": [{"output_type": "stream", "text": "out"}]},
        {"cell_type": "code", "source": []},
        {"cell_type": "raw", "source": "raw \ud83d\ude00 \ud800"},
    ]
    assert text_of(notebook, make_notebook(*cells)) == "# Title\ntext\n\nx = 1\n\nraw 😀 \ufffd"


def test_notebook_of_format_3() -> None:
    cells = [
        {"cell_type": "heading", "level": 2, "source": "Head"},
        {"cell_type": "heading", "level": 10**12, "source": "Low"},
        {"cell_type": "code", "input": ["a\n", "b"], "outputs": []},
    ]
    data = json.dumps({"nbformat": 3, "worksheets": [{"cells": cells}, {"cells": []}]}).encode()
    assert text_of(notebook, data) == "## Head\n\n###### Low\n\na\nb"


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b"[" * 100_000, b'{"nbformat": 4, "cells": 3}', b'{"nbformat": 4, "cells": [{}]}', b"\xff\xfe\0"]
)  # fmt: skip
def test_not_a_notebook(data: bytes) -> None:
    assert reason_of(notebook, data) == "not a notebook"


def test_notebook_without_text_or_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason_of(notebook, make_notebook()) == "no text"
    monkeypatch.setattr(notebook, "LARGEST_FILE", 10)
    assert reason_of(notebook, make_notebook()) == "too large"


# --- all of them ---


@pytest.mark.parametrize("kind", SAMPLES)
def test_damaged_files_are_read_or_unreadable(kind: str) -> None:
    reader, data = SAMPLES[kind]
    assert text_of(reader, data) == text_of(reader, data)
    chance = random.Random(0)
    cut = [data[:at] for at in range(0, len(data), max(1, len(data) // 60))]
    flipped = []
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(chance.choice([1, 3, 20])):
            changed[chance.randrange(len(data))] = chance.randrange(256)
        flipped.append(bytes(changed))
    for damaged in cut + flipped:
        try:
            for part in parts_of(reader, damaged):
                part.text.encode("utf-8")
        except Unreadable:
            pass


@pytest.mark.parametrize(
    ("kind", "library"),
    [("xml", "lxml"), ("docx", "lxml"), ("epub", "lxml")],
)
def test_a_missing_library_is_named_with_its_command(kind: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such(name: str, *args: object) -> object:
        if name.partition(".")[0] == library:
            raise ImportError(name)
        return import_(name, *args)  # type: ignore[arg-type]

    import_ = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", no_such)
    reader, data = SAMPLES[kind]
    with pytest.raises(Unreadable, match=rf"needs {library}: pip install '.*\[documents\]'"):
        parts_of(reader, data)
