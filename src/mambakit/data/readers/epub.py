"""EPUB: chapters of XHTML in a zip file, in the order that the book's package names them."""

from __future__ import annotations

import posixpath
import urllib.parse
import zipfile
from collections.abc import Iterator
from typing import BinaryIO

from ..documents import Parts, TextPart, Unreadable
from .html import LARGEST_COST, decode, text_of
from .word import open_entry, open_zip
from .xml import Event, events

LARGEST_ENTRY = 2**25  # bytes of a chapter, unpacked
LARGEST_BOOK = 2**28  # bytes of all chapters
MOST_CHAPTERS = 10_000
CONTAINER, ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
PAGES = ("application/xhtml+xml", "text/html", "text/x-oeb1-document")


def read(stream: BinaryIO) -> Parts:
    """A document for a book, a part for a chapter."""
    archive = open_zip(stream)
    names = set(archive.namelist())
    chapters = [name for name in _chapters(archive, names) if name in names]
    if _locked(archive, names) & set(chapters):
        raise Unreadable("encrypted")
    last, left, cost_left = "", LARGEST_BOOK, LARGEST_COST
    for name in chapters:
        data = open_entry(archive, name, min(LARGEST_ENTRY, left)).read()
        left -= len(data)
        text, cost = text_of(decode(data), cost_left)
        cost_left -= cost
        if last and text:
            yield TextPart(last + "\n\n", ends=False)
        last = text or last
    if not last:
        raise Unreadable("no text")
    yield TextPart(last)


def _chapters(archive: zipfile.ZipFile, names: set[str]) -> list[str]:
    """The files of the spine, in order: container.xml names the package, and its spine refers to its manifest."""
    roots = [event.attributes for event in _events(archive, CONTAINER) if _is_start(event, "rootfile")]
    package = next((name for root in roots if (name := root.get("full-path", "")) in names), None)
    if package is None:
        raise Unreadable("not an EPUB")
    manifest: dict[str, str] = {}
    spine: list[str] = []
    for event in _events(archive, package):
        if _is_start(event, "item") and event.attributes.get("media-type") in PAGES:
            manifest[event.attributes.get("id", "")] = event.attributes.get("href", "")
        elif _is_start(event, "itemref"):
            spine.append(event.attributes.get("idref", ""))
        if len(spine) > MOST_CHAPTERS or len(manifest) > MOST_CHAPTERS:
            raise Unreadable("too large")
    folder = posixpath.dirname(package)
    return [_path(folder, manifest[chapter]) for chapter in dict.fromkeys(spine) if chapter in manifest]


def _locked(archive: zipfile.ZipFile, names: set[str]) -> set[str]:
    """Files that encryption.xml names. Fonts may be among them in a book that can be read."""
    if ENCRYPTION not in names:
        return set()
    found = (event for event in _events(archive, ENCRYPTION) if _is_start(event, "CipherReference"))
    return {_path("", event.attributes.get("URI", "")) for event in found}


def _events(archive: zipfile.ZipFile, name: str) -> Iterator[Event]:
    if name not in archive.namelist():
        raise Unreadable("not an EPUB")
    return events(open_entry(archive, name, LARGEST_ENTRY))


def _is_start(event: Event, name: str) -> bool:
    return event.kind == "start" and event.value.rpartition("}")[2] == name


def _path(folder: str, reference: str) -> str:
    """The name in the zip file of a relative URL."""
    path = urllib.parse.unquote(reference.partition("#")[0])
    return posixpath.normpath(posixpath.join("/", folder, path)).lstrip("/")
