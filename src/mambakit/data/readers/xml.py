"""XML: its text in the order of the file. An element with text of its own is one line, with all that is inside it. An
element with elements alone is as many lines as they are.

`events` reads XML for all readers: no tree, no entities of the document's own, nothing from outside, bounded depth.
"""

from __future__ import annotations

import codecs
import html.entities
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

from ...files import pip_command
from ..documents import Parts, TextPart, Unreadable
from . import encodings
from .html import CONTROLS, SPACE

LARGEST_TEXT = 2**28  # characters of a document
LARGEST_ELEMENT = 2**25  # bytes, about, of text that is held until its element ends
PART_SIZE = 2**20  # characters, about
READ_BYTES = 2**16
OVERHEAD = 64  # bytes that Python takes for a string, about
DEEPEST = 1000  # elements inside each other
LARGEST_TOKEN = 64  # characters of a reference such as &eacute;

REFERENCE = re.compile(r"&([a-zA-Z][a-zA-Z0-9]*);")
ENTITIES = re.compile(r"<!DOCTYPE[^>\[]*\[[^\]]*<!ENTITY")
OWN = {"amp", "lt", "gt", "quot", "apos"}  # XML's own, which the parser knows


class Event(NamedTuple):
    """What the parser has read: "start" or "end" of an element with its tag, as "{namespace}name", or "text"."""

    kind: str
    value: str
    attributes: Mapping[str, str] = MappingProxyType({})


class _Events(list[Event]):
    """The target that lxml calls while it parses."""

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.append(Event("start", tag, dict(attributes)))

    def end(self, tag: str) -> None:
        self.append(Event("end", tag))

    def data(self, text: str) -> None:
        self.append(Event("text", text))

    def close(self) -> None:
        pass


def events(stream: BinaryIO) -> Iterator[Event]:
    """An XML file, event by event. Raises Unreadable if it is broken, nested too deep, or defines entities."""
    try:
        from lxml import etree
    except ImportError:
        raise Unreadable(f"needs lxml: {pip_command('documents')}") from None
    found = _Events()
    parser = etree.XMLParser(
        target=found, encoding="utf-8", resolve_entities=False, load_dtd=False, no_network=True, huge_tree=False
    )
    depth, reason = 0, ""
    for number, block in enumerate(itertools.chain(_blocks(stream), [""])):
        if number == 0 and ENTITIES.search(block):
            raise Unreadable("entities inside XML")
        try:
            if block:
                parser.feed(block.encode("utf-8", "replace"))
            else:
                parser.close()
        except (etree.LxmlError, ValueError):
            reason = "broken XML"
        for event in found:
            depth += (event.kind == "start") - (event.kind == "end")
            if depth > DEEPEST:
                raise Unreadable("nested too deep")
            yield event
        found.clear()
        if reason:
            raise Unreadable(reason)


def _blocks(stream: BinaryIO) -> Iterator[str]:
    """The decoded file, with HTML's named characters replaced: without a DTD, the parser drops or refuses them."""
    encoding = encodings.find(stream, is_markup=True)
    stream.seek(0)
    decoder = codecs.getincrementaldecoder(encoding.codec)(encoding.errors)
    text, ends = decoder.decode(stream.read(READ_BYTES)).lstrip(), False
    while not ends:
        data = stream.read(READ_BYTES)
        ends = not data
        text += decoder.decode(data, final=ends)
        cut = len(text)
        if not ends and (at := text.rfind("&", -LARGEST_TOKEN)) >= 0:
            cut = at  # the reference may continue in the next block
        if cut:
            yield CONTROLS.sub("", REFERENCE.sub(_character, text[:cut]))
        text = text[cut:]


def _character(match: re.Match[str]) -> str:
    code = html.entities.name2codepoint.get(match[1])
    return match[0] if code is None or match[1] in OWN else chr(code)


@dataclass
class _Open:
    """An open element: its text, and the lines of each element inside it."""

    inside: list[str | list[str]] = field(default_factory=list)
    is_line: bool = False
    spaces: str | None = None  # since the last element that has lines

    def add_text(self, text: str) -> None:
        self.inside.append(text)
        self.is_line |= not text.isspace()
        if self.spaces is not None and not self.is_line:
            self.spaces += text

    def add_element(self) -> None:
        """Two elements with only spaces between them, on one line of the file, belong to one line."""
        self.is_line |= bool(self.spaces) and "\n" not in (self.spaces or "")

    def add_lines(self, lines: list[str]) -> None:
        self.inside.append(lines)
        self.spaces = ""

    def lines(self) -> list[str]:
        lines, line = [], ""
        for each in self.inside:
            if isinstance(each, str):
                line += each
            elif self.is_line and len(each) == 1:
                line += each[0]
            else:
                lines += [line, *each]
                line = ""
        return [line for each in [*lines, line] if (line := SPACE.sub(" ", each).strip())]

    def size(self) -> int:
        texts = (text for each in self.inside for text in ([each] if isinstance(each, str) else each))
        return sum(len(text) + OVERHEAD for text in texts)


def read(stream: BinaryIO) -> Parts:
    """A document for a file, in parts."""
    return parts(_lines(stream))


def _lines(stream: BinaryIO) -> Iterator[str]:
    opened = [_Open()]
    held = tried = 0  # bytes, about, held in open elements: now, and at the last attempt to yield lines
    for event in events(stream):
        if event.kind == "text":
            opened[-1].add_text(event.value)
            held += len(event.value) + OVERHEAD
        elif event.kind == "start":
            opened[-1].add_element()
            opened.append(_Open())
        elif lines := opened.pop().lines():
            opened[-1].add_lines(lines)
        if held > LARGEST_ELEMENT:
            raise Unreadable("too large")
        if held - tried > PART_SIZE:
            for element in itertools.takewhile(lambda element: not element.is_line, opened):
                yield from element.lines()
                element.inside = []
            held = tried = sum(element.size() for element in opened)
    yield from opened[0].lines()


def parts(lines: Iterable[str]) -> Parts:
    """A document of these lines, in parts of about a megabyte, with at most one blank line between two others."""
    last, waiting, held, size = "", [""], 0, 0
    for line in lines:
        if not line and not waiting[-1]:
            continue
        waiting.append(line)
        held += len(line) + OVERHEAD
        if held > PART_SIZE:
            if last:
                yield TextPart(last, ends=False)
            last = "\n".join(waiting[1:]) + "\n"
            size += len(last)
            if size > LARGEST_TEXT:
                raise Unreadable("too large")
            waiting, held = [line], 0
    if rest := "\n".join(waiting[1:]):
        if last:
            yield TextPart(last, ends=False)
        last = rest
    if not last.strip():
        raise Unreadable("no text")
    yield TextPart(last.rstrip())
