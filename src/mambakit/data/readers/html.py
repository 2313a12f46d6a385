"""HTML: the text that a person sees on a page. Headings, paragraphs and list items are lines; tabs separate cells."""

from __future__ import annotations

import io
import re
from collections import Counter
from typing import TYPE_CHECKING, BinaryIO

from ..documents import Parts, TextPart, Unreadable, read_whole
from . import encodings

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

LARGEST_FILE = 2**26  # bytes; the tree takes many times as much memory
LARGEST_COST = 2**31  # see _cost


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


HIDDEN = _names("head script style template noscript iframe object embed svg math canvas audio video map datalist")
# Elements that are lines of their own, and those with a blank line around them.
LINES = _names(
    "address article aside body caption center dd details dialog dir div dt fieldset figcaption figure footer form"
    " header hgroup html legend li main menu nav optgroup option search section summary tbody tfoot thead tr"
)
PARAGRAPHS = _names("blockquote dl h1 h2 h3 h4 h5 h6 hr listing ol p plaintext pre table ul xmp")
VERBATIM = _names("listing plaintext pre textarea xmp")
CLOSES_ITSELF = _names("body dd dt hr html li optgroup option p tbody tfoot thead tr")
EMPTY = _names("area base br col embed hr img input link meta param source track wbr")
STYLES = _names("a b big code em font i nobr s small strike strong tt u")

SPACE = re.compile("[ \t\n\r\f\xa0]+")
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
NO_DISPLAY = re.compile(r"display\s*:\s*none", re.IGNORECASE)
# The beginning of a tag, or a comment; and an attribute.
TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*)|<!--(?:-?>|.*?(?:--!?>|\Z))", re.DOTALL)
ATTRIBUTE = re.compile(r"""[\s/]*[^\s/>][^\s/>=]*(?:\s*=\s*(?:"[^"]*"|'[^']*'|[^\s>"'][^\s>]*)?)?""")
RAW = {name: re.compile(f"</{name}", re.IGNORECASE) for name in ("script", "style")}  # the end of their content


def read(stream: BinaryIO) -> Parts:
    """A document for a file."""
    data = read_whole(stream, LARGEST_FILE)
    text, _ = text_of(decode(data))
    if not text:
        raise Unreadable("no text")
    yield TextPart(text)


def decode(data: bytes) -> str:
    """A page in any encoding. A slightly damaged page is read as browsers do, with U+FFFD for wrong bytes."""
    encoding = encodings.find(io.BytesIO(data), is_markup=True)
    return data.decode(encoding.codec, encoding.errors)


def text_of(html: str, largest_cost: int = LARGEST_COST) -> tuple[str, int]:
    """The text of a page, its title first, and its cost. Empty if it has no text."""
    from selectolax.lexbor import LexborHTMLParser

    cost = _cost(html, largest_cost)
    parser = LexborHTMLParser(html.encode("utf-8", "replace"))
    title = parser.css_first("head > title")
    text = SPACE.sub(" ", title.text()).strip() if title else ""
    body = _lines(parser.root) if parser.root else ""
    return CONTROLS.sub("", f"{text}\n\n{body}").strip("\n").rstrip(), cost


def _cost(html: str, largest: int) -> int:
    """An estimate of the parser's work, which may grow with the square of the size. Raises Unreadable above `largest`.

    At each block and each end tag, the parser searches all open elements; in each block, it opens unclosed styles
    again; and it compares styles, the attributes of a tag, and the options of a choice with each other.
    """
    opened: Counter[str] = Counter()
    depth = blocks = styles = options = cost = at = 0
    while (tag := TAG.search(html, at)) is not None:
        at = tag.end()
        if tag[2] is None:
            continue
        name, ends = tag[2].lower(), bool(tag[1])
        num_attributes = 0
        while (attribute := ATTRIBUTE.match(html, at)) is not None:
            at = attribute.end()
            num_attributes += 1
        cost += num_attributes**2
        step = -1 if ends else 1
        if ends and not opened[name]:
            cost += depth
        else:
            opened[name] += step
            depth += step if name not in CLOSES_ITSELF and name not in EMPTY else 0
        if name in STYLES:
            styles = max(0, styles + step)
            cost += 0 if ends else 2 * styles
        elif name in LINES or name in PARAGRAPHS:
            if name not in CLOSES_ITSELF:
                blocks = max(0, blocks + step)
            cost += blocks + 512 * styles
        if name == "option" and not ends:
            options += 1
            cost += 2 * options
        elif name == "select":
            options = 0
        elif name in RAW and not ends:
            at = end.start() if (end := RAW[name].search(html, at)) is not None else len(html)
        if cost > largest:
            raise Unreadable("nested too deep")
    return cost


def _lines(root: LexborNode) -> str:
    """The text below a node. No recursion: a page may be nested deeper than Python's stack."""
    out: list[str] = []
    newlines, tabs, space = 0, 0, False  # before the next text
    begun = False  # whether the row has text
    fresh = True  # nothing in this cell yet, so no line break either
    tall = False  # the cell has several lines, so the next one begins a line
    verbatim = 0  # open elements whose spaces count
    cells: list[int] = []  # of each open row
    node: LexborNode | None = root
    while node is not None:
        name, child = node.tag or "", None
        breaks = 2 if name in PARAGRAPHS else 1 if name in LINES else 0
        if name == "-text":
            content = node.text_content or ""
            words = content if verbatim else SPACE.sub(" ", content).strip(" ")
            space |= bool(content) and not verbatim and SPACE.match(content) is not None
            if words:
                tall |= bool(newlines) and not fresh
                between = "\n" * newlines + "\t" * tabs or (" " if space else "")
                out.append((between if out else "") + words)
                newlines, tabs, fresh, begun = 0, 0, False, True
                space = not verbatim and SPACE.match(content[-1]) is not None
        elif name == "br":
            newlines = newlines if fresh else min(2, newlines + 1)
        elif name in ("td", "th"):
            if cells and cells[-1]:
                newlines = 1 if tall else 0 if begun else newlines
                tabs = 0 if tall else tabs + 1
            if cells:
                cells[-1] += 1
            fresh, tall, child = True, False, node.first_child
        elif not _is_hidden(node):
            child = node.first_child
            if name == "tr":
                cells.append(0)
                newlines, tabs, begun, fresh, tall = max(newlines, 1), 0, False, True, False
            if breaks and not fresh:
                newlines, space = max(newlines, breaks), False
            verbatim += name in VERBATIM and child is not None
        if child is not None:
            node = child
            continue
        while node is not None:  # to the next node; elements that end here are closed
            if (following := node.next) is not None:
                node = following
                break
            node = node.parent
            name = node.tag or "" if node is not None else ""
            verbatim -= name in VERBATIM
            if name in ("td", "th") and begun:
                newlines = 0
            elif name == "tr":
                cells.pop()
                tabs, fresh = 0, False
            if (breaks := 2 if name in PARAGRAPHS else 1 if name in LINES else 0) and not fresh:
                newlines, space = max(newlines, breaks), False
    return "".join(out)


def _is_hidden(node: LexborNode) -> bool:
    if node.tag in HIDDEN:
        return True
    attributes = node.attributes
    return "hidden" in attributes or bool(NO_DISPLAY.search(attributes.get("style") or ""))
