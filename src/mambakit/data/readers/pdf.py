"""PDF: a page is characters with positions, mostly in reading order. They make runs, then rows, then paragraphs.

A run is characters without a wide gap: a line of a column, or a cell of a table. Each is rotated so that its text goes
to the right and its next line lies below, whatever its direction on the page. Gaps are measured in its height. The
file's own order is kept unless it jumps between columns. PDFium must not be called by two threads at once.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import math
import re
import statistics
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..documents import Parts, TextPart, Unreadable

LARGEST_WORK = 2**25  # characters and drawn objects of a document: seconds to minutes
WORK_OF_PAGE = 2**7  # in the same unit, for any page
LARGEST_PAGE = 2**20  # characters of a page
LARGEST_LAYOUT = 5000  # runs of a page in which columns are searched
NEEDS_PASSWORD = 4  # PDFium's FPDF_ERR_PASSWORD
WIDE_GAP = 1.2  # ends a run
CELL_GAP = 2.0  # a tab between runs of a row
NARROW = 6.0  # rows of less are no lines of a paragraph
COLUMN_LINES = 5  # a column has at least so many lines,
COLUMN_LETTERS = 16  # of at least so many characters on average; else it is a table

HYPHENS = "-\u00ad\u2010\u2011"
LIGATURES = re.compile("[\ufb00-\ufb06\ufb13-\ufb17]")
BULLET = re.compile(r"\S{1,3}\t|([•◦▪■●○‣⁃∗·\uf0b7–—*-]|\(?(\d{1,2}|[a-zA-Z])[.)])\s")
CELLS = re.compile(r".{4}.*\t|.*(\. ?){4}")  # a row of a table, or of a table of contents
SENTENCE_ENDS = tuple(".!?:;。")

Box = tuple[float, float, float, float, float, float]  # left, bottom, right, top; origin of the letter: x, y


@dataclass
class TextRun:
    """Characters side by side, or a row of runs, and its place on the page."""

    text: str
    left: float
    right: float
    base: float  # the line that letters stand on; more is higher
    height: float
    turn: int = 0  # quarters, as _turned has them


def read(stream: BinaryIO) -> Parts:
    """A document for a file, a part for a page. Pages that are broken or without text are skipped."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(stream)
    except pypdfium2.PdfiumError as error:
        raise Unreadable("encrypted" if error.err_code == NEEDS_PASSWORD else "broken PDF") from None
    last, left = "", LARGEST_WORK
    with contextlib.closing(document):
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
    if not last:
        raise Unreadable("broken PDF" if broken else "no text layer")
    yield TextPart(last)


def _page_text(document: Any, number: int, pdfium: Any) -> tuple[str, int]:
    """The text of a page, and its work: unlike time, the same on every machine."""
    with contextlib.closing(document[number]) as page, contextlib.closing(page.get_textpage()) as text_page:
        num_characters = text_page.count_chars()
        work = pdfium.FPDFPage_CountObjects(page) + num_characters
        if num_characters > LARGEST_PAGE:
            raise Unreadable("too large")
        runs = _runs(text_page, pdfium)
    return _paragraphs(_rows(_by_columns(runs))), work


def _runs(page: Any, pdfium: Any) -> list[TextRun]:
    """Characters joined in the file's order. PDFium marks the gaps between words and lines by spaces."""
    runs: list[TextRun] = []
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
        for turn in (angle, (angle + 1) % 4) if _is_cjk(character) else (angle,):  # may be a vertical line
            new, before = _turned(character, box, turn), runs[-1] if runs else None
            if before and before.turn != turn:
                before = None
                if last and len(runs[-1].text) == 1 and _is_cjk(last[0]) and last[2] == angle:
                    before = _turned(last[0], last[1], turn)
            if before and _follows(before, new, gap):
                runs[-1] = _joined(before, new, " " if _is_spaced(before, new, gap) else "")
                break
        else:
            runs.append(_turned(character, box, angle))
        gap, last = "", (character, box, angle)
    return runs


def _character(code: int) -> str:
    """The text of PDFium's code: letters for a ligature, nothing for a control, a hyphen for its hyphen mark."""
    if code in (0x02, 0xFFFE):
        return "-"
    if 0xD800 <= code < 0xE000 or code >= 0x110000:
        return "\ufffd"
    character = chr(code)
    if LIGATURES.match(character):
        return unicodedata.normalize("NFKC", character)
    return "" if unicodedata.category(character) == "Cc" and character not in "\t\n\r" else character


def _turned(character: str, box: Box, turn: int) -> TextRun:
    """A character as if the page were rotated by `turn` quarters, so that its line goes to the right."""
    left, bottom, right, top, x, y = box
    sides = [(left, right, y), (-top, -bottom, x), (-right, -left, -y), (bottom, top, -x)]
    across = right - left if turn % 2 else top - bottom
    return TextRun(character, *sides[turn], height=max(across, 0.1), turn=turn)


def _follows(run: TextRun, new: TextRun, gap: str) -> bool:
    """Whether a character follows directly after a run."""
    height = max(run.height, new.height)
    if abs(new.base - run.base) > 0.5 * height:
        return False
    if "\n" not in gap and (_is_rtl(new.text) or _is_rtl(run.text[-1])):
        return max(new.left - run.right, run.left - new.right) < WIDE_GAP * height
    return new.right > run.right - 0.5 * height and new.left - run.right < WIDE_GAP * height


def _is_spaced(run: TextRun, new: TextRun, gap: str) -> bool:
    if _is_cjk(run.text[-1]) and _is_cjk(new.text) and new.left - run.right < 0.6 * new.height:
        return False
    return new.left - run.right > 0.15 * new.height if "\n" in gap else bool(gap)  # \n: two lines where we see one


def _joined(run: TextRun, new: TextRun, between: str) -> TextRun:
    tallest = max(run, new, key=lambda each: each.height)  # not one that is raised or lowered
    left, right = min(run.left, new.left), max(run.right, new.right)
    return TextRun(run.text + between + new.text, left, right, tallest.base, tallest.height, run.turn)


def _is_cjk(text: str) -> bool:
    return unicodedata.east_asian_width(text[0]) in "WF"


def _is_rtl(text: str) -> bool:
    return unicodedata.bidirectional(text[0]) in ("R", "AL")


def _by_columns(runs: list[TextRun]) -> list[TextRun]:
    """The runs as they are, unless their order keeps changing between two columns of text."""
    turns = [run.turn for run in runs]
    main = [run for run in runs if run.turn == statistics.mode(turns)]
    gutter = _gutter(main)
    if gutter is None:
        return runs
    sides = [_side(run, gutter) for run in main]
    changes = sum(one != other for one, other in itertools.pairwise(side for side in sides if side))
    if changes <= 2 * (sides.count(0) + 1) + 0.25 * min(sides.count(-1), sides.count(1)):
        return runs
    return [*_arranged(main), *(run for run in runs if run.turn != main[0].turn)]


def _gutter(runs: Sequence[TextRun]) -> float | None:
    """The x that separates two columns of prose with the fewest runs across it; None if there is none."""
    if not 2 * COLUMN_LINES <= len(runs) <= LARGEST_LAYOUT:
        return None
    lefts, rights = sorted(run.left for run in runs), sorted(run.right for run in runs)
    best, found = 0, None
    for edge in sorted(set(rights)):
        at_left, at_right = bisect.bisect_right(rights, edge), len(lefts) - bisect.bisect_left(lefts, edge)
        score = min(at_left, at_right) - 2 * (len(runs) - at_left - at_right)
        if min(at_left, at_right) >= COLUMN_LINES and score > best:
            best, found = score, edge
    if found is None:
        return None
    for side in (-1, 1):
        lengths = [len(run.text) for run in runs if _side(run, found) == side]
        if statistics.fmean(lengths) < COLUMN_LETTERS:
            return None
    return found


def _side(run: TextRun, gutter: float) -> int:
    """-1: left of it, 1: right of it, 0: across."""
    return -1 if run.right <= gutter else 1 if run.left >= gutter else 0


def _arranged(runs: Sequence[TextRun]) -> list[TextRun]:
    """Runs by their places: one column after the other, between runs that lie across both."""
    runs = sorted(runs, key=lambda run: -run.base)
    gutter = _gutter(runs)
    if gutter is None:
        rows: list[list[TextRun]] = []
        for run in runs:
            if rows and abs(rows[-1][0].base - run.base) < 0.4 * run.height:
                rows[-1].append(run)
            else:
                rows.append([run])
        return [run for row in rows for run in sorted(row, key=lambda run: run.left)]
    ordered: list[TextRun] = []
    for across, band in itertools.groupby(runs, key=lambda run: _side(run, gutter) == 0):
        inside = list(band)
        if across:
            ordered += inside
        else:
            for side in (-1, 1):
                ordered += _arranged([run for run in inside if _side(run, gutter) == side])
    return ordered


def _rows(runs: Sequence[TextRun]) -> list[TextRun]:
    """Runs that follow each other on a line, as one."""
    rows: list[TextRun] = []
    for run in runs:
        row = rows[-1] if rows else run
        height = max(row.height, run.height)
        gap = run.left - row.right
        if _is_rtl(run.text) or _is_rtl(row.text):
            gap = max(gap, row.left - run.right)
        if rows and row.turn == run.turn and abs(row.base - run.base) < 0.4 * height and gap > -0.2 * height:
            rows[-1] = _joined(row, run, "\t" if gap > CELL_GAP * height else " " if gap > 0.1 * height else "")
        else:
            rows.append(run)
    return rows


def _paragraphs(rows: Sequence[TextRun]) -> str:
    """Rows as text: a paragraph on one line, a blank line for a gap."""
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
            is_next = _is_below(below, row) or (below.base > row.base and _is_alike(below, row))
            joins = goes_on and is_full[at] and is_next
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
    """Whether the first word of the next row has no room in a row; rows around it give the width of the column."""
    row, below = rows[at], rows[at + 1]
    if row.right - row.left < NARROW * row.height or CELLS.match(row.text) or CELLS.match(below.text):
        return False
    near = rows[max(within[0], at - 40) : min(within[1], at + 40)]
    rights = sorted(each.right for each in near if abs(each.left - row.left) < 3 * row.height and _is_alike(each, row))
    margin = rights[int(0.9 * (len(rights) - 1))]
    word = len(below.text.split(maxsplit=1)[0]) if not _is_cjk(below.text) else 1
    return row.right + (below.right - below.left) * (word + 0.5) / len(below.text) > margin


def _begins(below: TextRun, row: TextRun, start: TextRun) -> bool:
    """Whether a row begins a paragraph, by its indent or its bullet."""
    if BULLET.match(below.text):
        return True
    if abs((below.left + below.right) - (row.left + row.right)) < 0.5 * row.height:  # centred, or just as wide
        return False
    indent = (below.left - row.left) / row.height
    if indent > 0.6:
        return not (row is start and BULLET.match(row.text))
    return indent < -0.6 and row is not start


def _without_hyphen(text: str, following: str) -> tuple[str, str]:
    """The text of a line without a hyphen that splits a word, and the space before the next line, if any."""
    if text[-1] in HYPHENS and len(text) > 1 and text[-2].isalnum():
        is_split = text[-1] == "\u00ad" or (text[-2].islower() and following[0].islower())
        return (text[:-1] if is_split else text[:-1] + "-"), ""
    return text, "" if _is_cjk(text[-1]) and _is_cjk(following) else " "
