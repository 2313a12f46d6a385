"""Separators: markers such as <|endoftext|> between the documents of one file.

With a separator, text is cut wherever it stands, part by part: neither a file nor a document has to fit in memory.
Without one, well-known markers are counted, because a tokenizer reads them as letters of the text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from .documents import Parts, TextPart, Unreadable
from .tokenize import END_NAMES, END_OF_TEXT

KEPT = "none"  # as a separator: nothing is cut, and markers are not reported
# <|endoftext|> counts everywhere, the others alone on a line: some of them have a meaning in other texts.
ALONE = (*(name for name in END_NAMES if name != END_OF_TEXT), "<|eot_id|>", "<|im_end|>", "<s>", "<bos>", "<doc>")
MARKER = re.compile(rf"{re.escape(END_OF_TEXT)}|(?<![^\n])(?:{'|'.join(map(re.escape, ALONE))})(?![^\n])")
REACH = 32  # characters: the longest marker, and one after it
HELD = 2**16  # characters of white space that are held back until the next text is known
LOOKED_AT = 2**22  # characters in which the first separator of a file is searched


def separator_text(given: str | None) -> str | None:
    """The text to cut at, or None. A person writes a newline as a backslash and n, a tab as a backslash and t."""
    return None if given is None or given == KEPT else given.replace("\\n", "\n").replace("\\t", "\t")


def cut_at(parts: Iterable[TextPart], separator: str | None, found: Counter[str] | None = None) -> Parts:
    """The same text, cut into documents wherever the separator stands in text that is learned. Separators are removed,
    with the newlines next to them, and so are documents without a word. `found` counts the separators."""
    if separator is None:
        yield from parts
        return
    document = _Cutter(separator, Counter() if found is None else found)
    try:
        for part in parts:
            yield from document.take(part)
    except Unreadable:
        yield from document.flush()
        raise
    yield from document.flush()


class _Cutter:
    """Cuts parts into documents. It holds back text that may belong to a separator, and the last part until it is known
    whether the document ends there."""

    def __init__(self, separator: str, found: Counter[str]) -> None:
        self.separator, self.found = separator, found
        self._begin(after_separator=False)
        self.held = ""  # learned text that is not certain yet: newlines, and the beginning of a separator

    def _begin(self, *, after_separator: bool) -> None:
        self.after_separator = after_separator
        self.blank = ""  # white space at the beginning of the document
        self.waiting: TextPart | None = None

    def take(self, part: TextPart) -> Parts:
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

    def flush(self) -> Parts:
        """The rest of a file that ends in the middle of a document."""
        yield from self._write_held()
        if self.blank and not self.after_separator:
            yield TextPart(self.blank, ends=False)
        if self.waiting is not None:
            yield self.waiting
        self._begin(after_separator=False)

    def _certain(self, text: str) -> int:
        """How many characters cannot belong to a separator, or to the newlines before one."""
        at = len(text)
        for size in range(min(len(self.separator) - 1, len(text)), 0, -1):
            if text.endswith(self.separator[:size]):
                at -= size
                break
        return max(len(text[:at].rstrip("\n")), at - HELD)

    def _write_held(self) -> Parts:
        held, self.held = self.held, ""
        yield from self._write(held, True)

    def _write(self, text: str, learn: bool) -> Parts:
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
            self.waiting = TextPart(self.blank, ends=False)
        self.blank = ""
        if self.waiting is not None:
            yield self.waiting
        self.waiting = TextPart(text, learn, ends=False)

    def _end(self, *, at_separator: bool) -> Parts:
        if self.waiting is not None:
            yield TextPart(self.waiting.text, self.waiting.learn)
        elif not at_separator and not self.after_separator:
            yield TextPart(self.blank)  # no separator next to it: it stays as it is
        self._begin(after_separator=at_separator)


def has_several(parts: Parts) -> tuple[bool, Parts]:
    """Whether a file has more than one document in its first LOOKED_AT characters; and its parts."""
    seen: list[TextPart] = []
    size = 0
    problem: list[Unreadable] = []

    def all_parts() -> Parts:
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


def count_markers(parts: Iterable[TextPart], found: Counter[str]) -> Parts:
    """The same parts. All well-known markers in them are counted, also those that lie across two parts."""
    before = ""  # of the same document: one character, and the text whose markers are not counted yet
    is_new = True
    for part in parts:
        text = before + part.text
        begin = 0 if is_new else 1
        end = len(text) if part.ends else max(begin, len(text) - REACH)
        if any(marker in text for marker in (END_OF_TEXT, *ALONE)):
            found.update(match[0] for match in MARKER.finditer(text, begin) if match.start() < end)
        is_new = part.ends or (is_new and end == 0)
        before = "" if part.ends else text[max(0, end - 1) :]
        yield part
    found.update(match[0] for match in MARKER.finditer(before, 0 if is_new else 1))
