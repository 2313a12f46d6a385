"""Separators: a marker such as <|endoftext|> that stands between the documents of one file.

With a separator, text is cut wherever it stands, part by part, so that neither file nor document has to fit in memory.
Without one, well-known markers are counted, since a tokenizer would take them for letters of the text.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from ..files import UserError
from .documents import Part, Unreadable
from .tokenize import END_NAMES, END_OF_TEXT

KEPT = "none"  # in place of a separator: markers are letters of the text, and nobody is told
# <|endoftext|> is looked for everywhere, the others alone on a line: some of them have a meaning in other texts.
ALONE = (*(name for name in END_NAMES if name != END_OF_TEXT), "<|eot_id|>", "<|im_end|>", "<s>", "<bos>", "<doc>")
MARKER = re.compile(rf"{re.escape(END_OF_TEXT)}|(?<![^\n])(?:{'|'.join(map(re.escape, ALONE))})(?![^\n])")
REACH = 32  # characters that hold any marker and what stands after it
HELD = 2**16  # characters of newlines or of white space that are held back, to see what follows
LOOKED_AT = 2**22  # characters in which a file's first separator is looked for


def check_separator(separator: str | None) -> str | None:
    """The separator that was meant: None to look for one, or KEPT. A backslash and n stand for a newline."""
    if separator is None:
        return None
    found = separator.replace("\\n", "\n").replace("\\t", "\t")
    if not found:
        raise UserError(f"the separator is empty; give the text between documents, or {KEPT} to cut nowhere")
    if len(found) > HELD:
        raise UserError(f"the separator has {len(found)} characters; need at most {HELD}")
    return found


def cut(parts: Iterable[Part], separator: str, found: Counter[str] | None = None) -> Iterator[Part]:
    """The same text with a document ending wherever the separator stands, in text that is learned. The separator goes,
    and so do newlines next to it and documents without a word between two of them. `found` counts separators."""
    document = _Document(separator, Counter() if found is None else found)
    try:
        for part in parts:
            yield from document.take(part)
    except Unreadable:
        yield from document.flush()
        raise
    yield from document.flush()


class _Document:
    """The document that is being cut. What may belong to a separator is held back, and the last part too, until it is
    known whether the document ends with it."""

    def __init__(self, separator: str, found: Counter[str]) -> None:
        self.separator, self.found = separator, found
        self._begin(after_separator=False)
        self.held = ""  # learned text that was not looked at in full: newlines, and the beginning of a separator

    def _begin(self, *, after_separator: bool) -> None:
        self.after_separator = after_separator
        self.blank = ""  # white space that the document begins with
        self.waiting: Part | None = None

    def take(self, part: Part) -> Iterator[Part]:
        if part.learn:
            *before, rest = (self.held + part.text).split(self.separator)
            self.found[self.separator] += len(before)
            for text in before:
                yield from self._write(text.rstrip("\n"), True)
                yield from self._end(at_separator=True)
            self.held = "" if part.ends else rest[self._certain(rest) :]
            yield from self._write(rest[: len(rest) - len(self.held)], True)
        else:
            yield from self._write_held()
            yield from self._write(part.text, False)
        if part.ends:
            yield from self._end(at_separator=False)

    def flush(self) -> Iterator[Part]:
        """What is left of a file that ends in the middle of a document."""
        yield from self._write_held()
        if self.blank and not self.after_separator:
            yield Part(self.blank, ends=False)
        if self.waiting is not None:
            yield self.waiting
        self._begin(after_separator=False)

    def _certain(self, text: str) -> int:
        """How much of a text is no part of a separator, nor of the newlines before one."""
        at = len(text)
        for size in range(min(len(self.separator) - 1, len(text)), 0, -1):
            if text.endswith(self.separator[:size]):
                at -= size
                break
        return max(len(text[:at].rstrip("\n")), at - HELD)

    def _write_held(self) -> Iterator[Part]:
        held, self.held = self.held, ""
        yield from self._write(held, True)

    def _write(self, text: str, learn: bool) -> Iterator[Part]:
        if self.waiting is not None and not text:
            return
        if self.waiting is None and learn:
            text = self.blank + text
            if self.after_separator:
                text = text.lstrip("\n")
            if not text.strip() and len(text) <= HELD:
                self.blank = text
                return
        elif self.blank:
            self.waiting = Part(self.blank, ends=False)
        self.blank = ""
        if self.waiting is not None:
            yield self.waiting
        self.waiting = Part(text, learn, ends=False)

    def _end(self, *, at_separator: bool) -> Iterator[Part]:
        if self.waiting is not None:
            yield Part(self.waiting.text, self.waiting.learn)
        elif not at_separator and not self.after_separator:
            yield Part(self.blank)  # no separator is near: it stays as it was
        self._begin(after_separator=at_separator)


def has_several(parts: Iterator[Part]) -> tuple[bool, Iterator[Part]]:
    """Whether a file has more than one document, as far as the first LOOKED_AT characters say; and its parts."""
    seen: list[Part] = []
    size = 0
    problem: list[Unreadable] = []

    def all_parts() -> Iterator[Part]:
        yield from seen
        if problem:
            raise problem[0]
        yield from parts

    try:
        for part in parts:
            seen.append(part)
            if len(seen) > 1 and seen[-2].ends:
                return True, all_parts()
            size += len(part.text)
            if size > LOOKED_AT:
                break
    except Unreadable as reason:
        problem.append(reason)
    return False, all_parts()


def watched(parts: Iterable[Part], found: Counter[str]) -> Iterator[Part]:
    """The same parts; all well-known markers in them are counted, across the borders of parts too."""
    before = ""  # of the same document: one character, and those whose markers were not counted yet
    is_new = True
    for part in parts:
        text = before + part.text
        begin = 0 if is_new else 1
        end = len(text) if part.ends else max(begin, len(text) - REACH)
        if _may_have(text):
            found.update(match[0] for match in MARKER.finditer(text, begin) if match.start() < end)
        is_new = part.ends or (is_new and end == 0)
        before = "" if part.ends else text[max(0, end - 1) :]
        yield part
    found.update(match[0] for match in MARKER.finditer(before, 0 if is_new else 1))


def _may_have(text: str) -> bool:
    return any(marker in text for marker in itertools.chain((END_OF_TEXT,), ALONE))
