"""PDF: a page is characters at places, mostly in reading order. Characters make pieces, pieces rows, rows paragraphs.

A piece is a stretch of characters without a wide gap: a line of a column, or a cell of a table. Each is turned so that
its text runs to the right and its next line lies below, whichever way it stands on the page; gaps are measured in its
height. The file's own order is kept unless it runs across columns. PDFium must not be called by two threads at once.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import math
import re
import statistics
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..documents import TextPart, Unreadable

LARGEST_WORK = 2**25  # characters and drawn objects of a document, which are seconds to minutes
WORK_OF_PAGE = 2**7  # in such, if it is empty or broken
LARGEST_PAGE = 2**20  # characters of a page
LARGEST_LAYOUT = 5000  # pieces of a page that are looked at for columns
NEEDS_PASSWORD = 4  # PDFium's FPDF_ERR_PASSWORD
WIDE_GAP = 1.2  # ends a piece
CELL_GAP = 2.0  # a tab between pieces of a row
NARROW = 6.0  # rows of less are no lines of a paragraph
COLUMN_LINES = 5  # a column has at least as many,
COLUMN_LETTERS = 16  # and so many characters in a line on average: less is a table

HYPHENS = "-\u00ad\u2010\u2011"
LIGATURES = re.compile("[\ufb00-\ufb06\ufb13-\ufb17]")
BULLET = re.compile(r"\S{1,3}\t|([•◦▪■●○‣⁃∗·\uf0b7–—*-]|\(?(\d{1,2}|[a-zA-Z])[.)])\s")
CELLS = re.compile(r".{4}.*\t|.*(\. ?){4}")  # a row of a table, or of a table of contents
SENTENCE_ENDS = tuple(".!?:;。")

Box = tuple[float, float, float, float, float, float]  # left, bottom, right, top; where its letter stands: x, y


@dataclass
class TextRun:
    """Characters side by side; also a row of such, and how they stand on the page."""

    text: str
    left: float
    right: float
    base: float  # the line that letters stand on; more is higher
    height: float
    turn: int = 0  # quarters, as _turned has them


def read(stream: BinaryIO) -> Iterator[TextPart]:
    """A document for a file, a part for a page. Pages without text are passed over, as are broken ones among others."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(stream)
    except pypdfium2.PdfiumError as error:
        raise Unreadable("encrypted" if error.err_code == NEEDS_PASSWORD else "broken PDF") from None
    last, left = "", LARGEST_WORK
    try:
        broken = len(document) == 0
        for number in range(len(document)):
            left -= WORK_OF_PAGE
            try:
                text, work = _page_text(document, number, pypdfium2.raw)
            except pypdfium2.PdfiumError:
                broken = True
                text, work = "", 0
            left -= work
            if left < 0:
                raise Unreadable("too large")
            if last and text:
                yield TextPart(last + "\n\n", ends=False)
            last = text or last
    finally:
        document.close()
    if not last:
        raise Unreadable("broken PDF" if broken else "no text layer")
    yield TextPart(last)


def _page_text(document: Any, number: int, pdfium: Any) -> tuple[str, int]:
    """The text of a page, and what work it was: the same on every machine, as time is not."""
    page = document[number]
    try:
        text_page = page.get_textpage()
        try:
            num_characters = text_page.count_chars()
            work = pdfium.FPDFPage_CountObjects(page) + num_characters
            if num_characters > LARGEST_PAGE:
                raise Unreadable("too large")
            pieces = _pieces(text_page, pdfium)
        finally:
            text_page.close()
    finally:
        page.close()
    return _paragraphs(_rows(_by_columns(pieces))), work


def _pieces(page: Any, pdfium: Any) -> list[TextRun]:
    """Characters put together in the file's order. PDFium has marked the gaps between words and lines by spaces."""
    pieces: list[TextRun] = []
    rect, x, y = pdfium.FS_RECTF(), ctypes.c_double(), ctypes.c_double()
    gap = ""
    last: tuple[str, Box, int] | None = None
    for index in range(page.count_chars()):
        character = _character(pdfium.FPDFText_GetUnicode(page, index))
        if not character.strip():
            gap += character
            continue
        pdfium.FPDFText_GetCharOrigin(page, index, x, y)
        pdfium.FPDFText_GetLooseCharBox(page, index, rect)
        box = (rect.left, rect.bottom, rect.right, rect.top, x.value, y.value)
        if not all(map(math.isfinite, box)):
            continue
        angle = round(pdfium.FPDFText_GetCharAngle(page, index) / (math.pi / 2)) % 4
        for turn in (angle, (angle + 1) % 4) if _is_cjk(character) else (angle,):  # a column of upright signs?
            new, before = _turned(character, box, turn), pieces[-1] if pieces else None
            if before and before.turn != turn:
                before = None
                if last and len(pieces[-1].text) == 1 and _is_cjk(last[0]) and last[2] == angle:
                    before = _turned(last[0], last[1], turn)
            if before and _follows(before, new, gap):
                pieces[-1] = _joined(before, new, " " if _is_spaced(before, new, gap) else "")
                break
        else:
            pieces.append(_turned(character, box, angle))
        gap, last = "", (character, box, angle)
    return pieces


def _character(code: int) -> str:
    """What PDFium's code stands for: letters for ligatures, nothing for controls, and a hyphen for its mark of one."""
    if code in (0x02, 0xFFFE):
        return "-"
    if 0xD800 <= code < 0xE000 or code >= 0x110000:
        return "\ufffd"
    character = chr(code)
    if LIGATURES.match(character):
        return unicodedata.normalize("NFKC", character)
    return "" if unicodedata.category(character) == "Cc" and character not in "\t\n\r" else character


def _turned(character: str, box: Box, turn: int) -> TextRun:
    """A character as if the page were turned by `turn` quarters, so that its line runs to the right."""
    left, bottom, right, top, x, y = box
    sides = [(left, right, y), (-top, -bottom, x), (-right, -left, -y), (bottom, top, -x)]
    across = right - left if turn % 2 else top - bottom
    return TextRun(character, *sides[turn], height=max(across, 0.1), turn=turn)


def _follows(piece: TextRun, new: TextRun, gap: str) -> bool:
    """Whether a character goes on where a piece ends."""
    height = max(piece.height, new.height)
    if abs(new.base - piece.base) > 0.5 * height:
        return False
    if "\n" not in gap and (_is_rtl(new.text) or _is_rtl(piece.text[-1])):
        return max(new.left - piece.right, piece.left - new.right) < WIDE_GAP * height
    return new.right > piece.right - 0.5 * height and new.left - piece.right < WIDE_GAP * height


def _is_spaced(piece: TextRun, new: TextRun, gap: str) -> bool:
    if _is_cjk(piece.text[-1]) and _is_cjk(new.text) and new.left - piece.right < 0.6 * new.height:
        return False
    return new.left - piece.right > 0.15 * new.height if "\n" in gap else bool(gap)  # \n: two lines where we see one


def _joined(piece: TextRun, new: TextRun, between: str) -> TextRun:
    tallest = max(piece, new, key=lambda each: each.height)  # not one that is raised or lowered
    left, right = min(piece.left, new.left), max(piece.right, new.right)
    return TextRun(piece.text + between + new.text, left, right, tallest.base, tallest.height, piece.turn)


def _is_cjk(text: str) -> bool:
    return unicodedata.east_asian_width(text[0]) in "WF"


def _is_rtl(text: str) -> bool:
    return unicodedata.bidirectional(text[0]) in ("R", "AL")


def _by_columns(pieces: list[TextRun]) -> list[TextRun]:
    """The pieces as they are, unless their order keeps changing between two columns of text."""
    turns = [piece.turn for piece in pieces]
    main = [piece for piece in pieces if piece.turn == statistics.mode(turns)]
    gutter = _gutter(main)
    if gutter is None:
        return pieces
    sides = [_side(piece, gutter) for piece in main]
    changes = sum(one != other for one, other in itertools.pairwise(side for side in sides if side))
    if changes <= 2 * (sides.count(0) + 1) + 0.25 * min(sides.count(-1), sides.count(1)):
        return pieces
    return [*_arranged(main), *(piece for piece in pieces if piece.turn != main[0].turn)]


def _gutter(pieces: Sequence[TextRun]) -> float | None:
    """Where a page is parted into two columns of prose, with the fewest pieces that lie across."""
    if not 2 * COLUMN_LINES <= len(pieces) <= LARGEST_LAYOUT:
        return None
    lefts, rights = sorted(piece.left for piece in pieces), sorted(piece.right for piece in pieces)
    best, found = 0, None
    for edge in sorted(set(rights)):
        at_left, at_right = bisect.bisect_right(rights, edge), len(lefts) - bisect.bisect_left(lefts, edge)
        score = min(at_left, at_right) - 2 * (len(pieces) - at_left - at_right)
        if min(at_left, at_right) >= COLUMN_LINES and score > best:
            best, found = score, edge
    if found is None:
        return None
    for side in (-1, 1):
        lengths = [len(piece.text) for piece in pieces if _side(piece, found) == side]
        if statistics.fmean(lengths) < COLUMN_LETTERS:
            return None
    return found


def _side(piece: TextRun, gutter: float) -> int:
    """-1: left of it, 1: right of it, 0: across."""
    return -1 if piece.right <= gutter else 1 if piece.left >= gutter else 0


def _arranged(pieces: Sequence[TextRun]) -> list[TextRun]:
    """Pieces by their places: down one column and then the next, between those that lie across."""
    pieces = sorted(pieces, key=lambda piece: -piece.base)
    gutter = _gutter(pieces)
    if gutter is None:
        rows: list[list[TextRun]] = []
        for piece in pieces:
            if rows and abs(rows[-1][0].base - piece.base) < 0.4 * piece.height:
                rows[-1].append(piece)
            else:
                rows.append([piece])
        return [piece for row in rows for piece in sorted(row, key=lambda piece: piece.left)]
    ordered: list[TextRun] = []
    for across, band in itertools.groupby(pieces, key=lambda piece: _side(piece, gutter) == 0):
        inside = list(band)
        if across:
            ordered += inside
        else:
            for side in (-1, 1):
                ordered += _arranged([piece for piece in inside if _side(piece, gutter) == side])
    return ordered


def _rows(pieces: Sequence[TextRun]) -> list[TextRun]:
    """Pieces that follow each other on a line, as one."""
    rows: list[TextRun] = []
    for piece in pieces:
        row = rows[-1] if rows else piece
        height = max(row.height, piece.height)
        gap = piece.left - row.right
        if _is_rtl(piece.text) or _is_rtl(row.text):
            gap = max(gap, row.left - piece.right)
        if rows and row.turn == piece.turn and abs(row.base - piece.base) < 0.4 * height and gap > -0.2 * height:
            rows[-1] = _joined(row, piece, "\t" if gap > CELL_GAP * height else " " if gap > 0.1 * height else "")
        else:
            rows.append(piece)
    return rows


def _paragraphs(rows: Sequence[TextRun]) -> str:
    """Rows as text: those of a paragraph on one line, a blank line where there is a gap."""
    if not rows:
        return ""
    pairs = list(itertools.pairwise(rows))
    steps = [(row.base - below.base) / below.height for row, below in pairs if _is_below(below, row)]
    step = 1.35 * statistics.median(steps) if steps else 1.6
    is_near = [_is_below(below, row) and row.base - below.base <= step * below.height for row, below in pairs]
    is_full: list[bool] = []
    flows: list[bool] = []  # whether the lines of a block are mostly full; in a list or a program they are not
    for near, block in itertools.groupby(range(len(pairs)), key=lambda at: is_near[at]):
        inside = list(block)
        within = (inside[0], inside[-1] + 2) if near and len(inside) > 2 else (0, len(rows))
        is_full += [_is_full(rows, at, within) for at in inside]
        flows += [near and sum(is_full[at] for at in inside) >= 0.4 * len(inside)] * len(inside)
    text, start = [rows[0].text], rows[0]  # start: the row that the paragraph begins with
    for at, (row, below) in enumerate(pairs):
        goes_on = not row.text.endswith(SENTENCE_ENDS) and below.text[0].islower()
        if is_near[at]:
            joins = flows[at] and (is_full[at] or goes_on) and not _begins(below, row, start)
            joins |= goes_on and is_full[at] and row.text[-1] in HYPHENS
        else:  # the next column, or a line that is set apart
            joins = (
                goes_on and is_full[at] and (_is_below(below, row) or (below.base > row.base and _is_alike(below, row)))
            )
        if joins:
            text[-1], between = _without_hyphen(text[-1], below.text)
            text.append(between + below.text)
        else:
            text.append(("\n" if is_near[at] else "\n\n") + below.text)
            start = below
    return "".join(text)


def _is_alike(row: TextRun, other: TextRun) -> bool:
    return row.turn == other.turn and 2 / 3 < row.height / other.height < 3 / 2


def _is_below(below: TextRun, row: TextRun) -> bool:
    """Whether a row may be the next line of the one before."""
    if not _is_alike(row, below) or below.left > row.right or below.right < row.left:
        return False
    return 0.3 * row.height < row.base - below.base < 3 * row.height


def _is_full(rows: Sequence[TextRun], at: int, within: tuple[int, int]) -> bool:
    """Whether a row leaves no room for the first word of the next one, in a column as wide as most rows around it."""
    row, below = rows[at], rows[at + 1]
    if row.right - row.left < NARROW * row.height or CELLS.match(row.text) or CELLS.match(below.text):
        return False
    around = rows[max(within[0], at - 40) : min(within[1], at + 40)]
    rights = sorted(
        each.right for each in around if abs(each.left - row.left) < 3 * row.height and _is_alike(each, row)
    )
    margin = rights[int(0.9 * (len(rights) - 1))]
    word = len(below.text.split(maxsplit=1)[0]) if not _is_cjk(below.text) else 1
    return row.right + (below.right - below.left) * (word + 0.5) / len(below.text) > margin


def _begins(below: TextRun, row: TextRun, start: TextRun) -> bool:
    """Whether a row begins a paragraph by where it stands or by its mark."""
    if BULLET.match(below.text):
        return True
    if abs((below.left + below.right) - (row.left + row.right)) < 0.5 * row.height:  # centred, or just as wide
        return False
    indent = (below.left - row.left) / row.height
    if indent > 0.6:
        return not (row is start and BULLET.match(row.text))
    return indent < -0.6 and row is not start


def _without_hyphen(text: str, following: str) -> tuple[str, str]:
    """A line's text and what goes between it and the next: nothing where a word goes on."""
    if text[-1] in HYPHENS and len(text) > 1 and text[-2].isalnum():
        is_split = text[-1] == "\u00ad" or (text[-2].islower() and following[0].islower())
        return (text[:-1] if is_split else text[:-1] + "-"), ""
    return text, "" if _is_cjk(text[-1]) and _is_cjk(following) else " "
