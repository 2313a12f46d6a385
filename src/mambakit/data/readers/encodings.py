"""The encoding of a file, for all formats that are text. The first of these that fits decides:

- a byte-order mark;
- the declaration of HTML or XML, if the whole file decodes in it, unless as UTF-8 it is more like a language;
- the escape sequences of ISO-2022, if the whole file decodes with them: in ASCII they are text;
- UTF-8;
- UTF-16 or UTF-32, by the places of zero bytes;
- the declaration of plain text, then the guesses of charset-normalizer; the first is the one whose letters are those of
  one language.

The whole file must decode, or it is Unreadable. Markup may be slightly damaged, as in browsers.
"""

from __future__ import annotations

import codecs
import io
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import BinaryIO, NamedTuple

from ..documents import Unreadable

PIECE_CHARACTERS = 2**18
READ_BYTES = PIECE_CHARACTERS - 16  # a character has at least a byte; a decoder may hold back some
SAMPLE_BYTES = 2**20
HEAD_BYTES = 2**10  # of plain text, in which it may declare its encoding
DECLARED_WITHIN = 2**12  # bytes of HTML and XML, likewise

MARKS = {  # UTF-32 first: one of its marks begins with that of UTF-16
    "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
CONTROLS = bytes(set(range(32)) - set(b"\b\t\n\f\r\x1a\x1b"))  # control characters that text does not have
CLEAN_SHARE = 16  # text with NULs has at most one such control character in so many bytes
DAMAGED_SHARE = 20  # markup has at most one wrong character in so many that are not ASCII

# Encodings of text besides Unicode; of two that read a file equally well, the earlier wins.
LIKELY_NAMES = """
    cp1252 cp1251 cp1250 gb18030 big5 cp950 big5hkscs cp932 euc_jp euc_jis_2004 cp949 koi8_r koi8_u cp866 iso8859_5
    mac_cyrillic iso8859_2 iso8859_15 cp1253 iso8859_7 cp1254 cp1255 iso8859_8 cp1256 iso8859_6 cp874 cp850 cp437
    cp852 mac_roman johab cp1257 cp737 cp855 cp862 mac_greek
"""
LIKELY = LIKELY_NAMES.split()


def _pairs(text: str) -> dict[str, str]:
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


# Names that are used for more characters than they have, each before the encoding that contains all of them.
WIDER = _pairs("""
    ascii cp1252  big5 big5hkscs  euc_kr cp949  gb2312 gb18030  gbk gb18030  iso8859_1 cp1252  iso8859_11 cp874
    iso8859_9 cp1254  shift_jis cp932  tis_620 cp874
""")
# Names that browsers know and Python does not.
LABELS = _pairs("""
    dos-874 cp874  iso-8859-8-i iso8859_8  koi koi8_r  logical iso8859_8  visual iso8859_8  windows-31j cp932
    windows-874 cp874  windows-949 cp949  x-cp1250 cp1250  x-cp1251 cp1251  x-cp1252 cp1252  x-euc-jp euc_jp
    x-gbk gb18030  x-mac-cyrillic mac_cyrillic  x-mac-ukrainian mac_cyrillic  x-sjis cp932  x-x-big5 big5hkscs
""")
TEXT = re.compile(r"ascii|(cp|iso8859_|iso2022_|koi8_|mac_|gb|big5|euc_|shift_)\w*|hz|johab|tis_620|kz1048|ptcp154")
IN_MARKUP = re.compile(rb"""<(?:meta\b[^>]*?charset|\?xml\b[^>]*?encoding)\s*=\s*["']?\s*([-\w.:]+)""", re.IGNORECASE)
IN_TEXT = re.compile(rb"""(?:encoding|charset|coding)\s*[=:]\s*["']?([A-Za-z0-9_.:-]{1,40})""")

# Characters between two escape sequences, or the sequence that allows SO and SI.
ISO_2022 = re.compile(r"\x1b\$(?:[@AB]|\([A-Z@])(?:[!-~]{2})+(?:[\x1b\r\n]|$)|\x1b\$\)[ACEG](?s:.){0,500}?\x0e")
JAPANESE_2022 = ("iso2022_jp", "iso2022_jp_ext", "iso2022_jp_2", "iso2022_jp_2004")
LONGEST_RUN = 2**10  # characters between escapes, which may lie across two pieces

# Lower-case letters of languages. Of languages with Latin letters, those that are not ASCII.
LATIN = """
    àâæçéèêëîïôœùûüÿ äöüß áéíóúüñ ãõáéíóúâêôçàü àèéìíîòóùú àáçèéíïòóúü áäèéëïóöü åäöé æøåé áéíóúýðþæö áéíóúæøåýð
    äöüõšž ëç êëéïôû ąćęłńóśźż áčďéěíňóřšťúůýž áäčďéíĺľňóôŕšťúýž áéíóöőúüű ăâîșțşţ čćđšž çğıi̇öşüâîû āčēģīķļņšūž
    ąčęėįšųūž
"""
# Of other languages all letters, the most frequent first.
OTHERS = """
    оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфъё оаинівтерслкдумпзябьгчйїєхюшцжщфґ аоеинрсутдквјмплбгзшћчцњжљхђфџ
    аніеыорскляутдвпмзгьбчйўцжхшюэёф аоеинтрсвкдмпулгзбјшчцжќѓљњхфџѕ αοιετσνηυρπκςμλίόάγδέήωθφχβύξώζψϊϋΐΰ
    יוהלאמרתבשםנחדעקפכטסןגצזךףץ اليمنوترةبعدسفهكقحجشطصخأإذضزثىغءآؤئظـًٌٍَُِّْپچژگکی،؛؟
"""
FREQUENT = 10  # letters, about two thirds of a text; a wrong encoding gives fewer of them
LEAST_FREQUENT = 0.6
THAI = frozenset(map(chr, range(0xE01, 0xE5C)))
PUNCTUATION = frozenset(
    "“”„‘’‚–—…«»‹›•·§°©®™€£¥¿¡ºª×½¼¾²³µ№±†\xa0\xad、。，．：；？！（）「」『』《》〈〉【】・ー～々〜"
)
INSIDE_WORDS = frozenset("’—…·\xad")
JUDGED_CHARACTERS = 2**14
NOT_ASCII = bytes(range(0x80, 0x100))
FEW_BYTES = 3  # too few for a guess: the first encoding of LIKELY is tried first
UNCLEAR = 0.5  # if less of the non-ASCII text belongs to one language, the encoding is wrong
CLEAR = 0.9  # if more of it belongs to one language, this share decides


class Encoding(NamedTuple):
    """A codec, and how it treats wrong bytes."""

    codec: str
    errors: str = "strict"


def find(stream: BinaryIO, *, is_markup: bool = False, least_wrong: int | None = None) -> Encoding:
    """The encoding of a whole file. Raises Unreadable if there is none. With `least_wrong` or `is_markup`, a mostly
    right file is accepted, and its wrong bytes become U+FFFD. With `least_wrong`, the encoding is guessed only if so
    many bytes are wrong in UTF-8."""
    stream.seek(0)
    head = stream.read(SAMPLE_BYTES)
    is_lenient = is_markup or least_wrong is not None
    for codec, marks in MARKS.items():
        if head.startswith(marks):
            return _checked(stream, codec, is_lenient, "unknown encoding")
    declared = _declared(head, is_markup)
    has_nul = b"\0" in head
    is_clean = not has_nul or len(head) - len(head.translate(None, CONTROLS)) <= len(head) // CLEAN_SHARE
    utf8 = _look(stream, "utf-8-sig") if is_clean else _Look(fault=0)
    if utf8.is_blank and not is_lenient:
        raise Unreadable("empty")
    if utf8.fault is not None and has_nul:
        wide = _without_mark(head)
        if wide and (not is_markup or "<" in head.decode(wide, "ignore")):
            return _checked(stream, wide, is_lenient, "binary")
        if not is_lenient:
            raise Unreadable("binary")
        utf8 = _look(stream, "utf-8-sig")
    is_right = bool(is_markup and declared) and _look(stream, declared).fault is None  # what the file declares
    if is_right and (utf8.fault is not None or not _is_rather_utf8(stream, declared)):
        return Encoding(declared)
    if utf8.fault is None:
        return Encoding(_iso_2022(stream) if utf8.has_escapes else "utf-8-sig")
    if is_markup and declared:
        wrong, other = _count_wrong(stream, Encoding(declared, "replace"))
        if wrong * DAMAGED_SHARE <= other:
            return Encoding(declared, "replace")
    return _guessed(stream, utf8.fault, declared, is_markup, least_wrong)


def _checked(stream: BinaryIO, codec: str, is_lenient: bool, reason: str) -> Encoding:
    seen = _look(stream, codec)
    if not is_lenient and (seen.is_blank or seen.fault is not None):
        raise Unreadable("empty" if seen.is_blank else reason)
    return Encoding(codec, "strict" if seen.fault is None else "replace")


def _guessed(stream: BinaryIO, fault: int, declared: str, is_markup: bool, least_wrong: int | None) -> Encoding:
    """The encoding of a file that is neither ASCII nor Unicode."""
    sample = _sample(stream, fault)
    is_lenient = is_markup or least_wrong is not None
    wrong, other = _count_wrong(stream if is_lenient else io.BytesIO(sample), Encoding("utf-8-sig", "replace"))
    if 2 * wrong <= other or wrong < (least_wrong or 0):
        if is_lenient:
            return Encoding("utf-8-sig", "replace")
        raise Unreadable("damaged UTF-8")  # a one-byte encoding would decode it, to nonsense
    samples = [_outside_tags(sample), sample] if is_markup else [sample]
    if sample[-1] > 0x7F:  # it may end inside a character
        samples += [sample[:-size] for size in (1, 2, 3)]
    is_declared = declared and not is_markup and not _is_unclear(sample.decode(declared, "replace"))
    hints = [declared] if is_declared else []
    for guess in itertools.chain(hints, *map(_guesses, samples)):
        if _look(stream, guess).fault is None:
            return Encoding(guess)
    raise Unreadable("unknown encoding")


def pieces(stream: BinaryIO, encoding: Encoding) -> Iterator[str]:
    """All text of a file, without NULs and with \\n for newlines; a piece is never empty. Raises UnicodeError."""
    stream.seek(0)
    decode = codecs.getincrementaldecoder(encoding.codec)(encoding.errors)
    decoder = io.IncrementalNewlineDecoder(decode, translate=True)
    more = True
    while more:
        block = stream.read(READ_BYTES)
        more = bool(block)
        if piece := decoder.decode(block, final=not more).replace("\0", ""):
            yield piece


def codec_of(label: str) -> str:
    """Python's name for a declared encoding; "" for UTF-8, and for what is no encoding of text. A declaration that can
    be read is not UTF-16."""
    try:
        name = codecs.lookup(LABELS.get(label.lower(), label)).name.replace("-", "_")
    except (LookupError, ValueError):
        return ""
    if not TEXT.fullmatch(name) or "charset".encode(name) != b"charset":  # some of IBM's are not like ASCII
        return ""
    return WIDER.get(name, name)


@dataclass(frozen=True)
class _Look:
    """The result of decoding a file."""

    fault: int | None = None  # a position shortly before the first wrong byte
    is_blank: bool = False
    has_escapes: bool = False  # of ISO-2022


def _look(stream: BinaryIO, codec: str) -> _Look:
    is_blank, has_escapes, last = True, False, ""
    try:
        for piece in pieces(stream, Encoding(codec)):
            is_blank = is_blank and piece.isspace()
            has_escapes = has_escapes or "\x1b$" in piece or (last == "\x1b" and piece[0] == "$")
            last = piece[-1]
    except UnicodeError:
        return _Look(fault=max(0, stream.tell() - 2 * READ_BYTES))
    return _Look(None, is_blank, has_escapes)


def _declared(head: bytes, is_markup: bool) -> str:
    """The encoding that the file declares, as XML, HTML and source code may; "" if it is not known."""
    if head.startswith(codecs.BOM_UTF8):
        return ""
    match = IN_MARKUP.search(head[:DECLARED_WITHIN]) if is_markup else IN_TEXT.search(head[:HEAD_BYTES])
    return codec_of(match[1].decode("ascii", "replace")) if match else ""


def _is_rather_utf8(stream: BinaryIO, declared: str) -> bool:
    """Whether a file that decodes both ways is more like a language as UTF-8 than as declared."""
    sample = _sample(stream, 0)
    as_utf8, as_declared = (_share_of_a_language(sample.decode(codec, "ignore")) for codec in ("utf-8", declared))
    return as_utf8 > as_declared


def _iso_2022(stream: BinaryIO) -> str:
    """The codec of an ASCII file with escapes. They may also be those of a terminal."""
    before = ""
    for piece in pieces(stream, Encoding("utf-8-sig")):
        if match := ISO_2022.search(before + piece):
            break
        before = piece[-LONGEST_RUN:]
    else:
        return "utf-8-sig"
    announced = match[0][:4]
    for codec in ("iso2022_kr",) if announced == "\x1b$)C" else () if announced[2] == ")" else JAPANESE_2022:
        if _look(stream, codec).fault is None:
            return codec
    raise Unreadable("unknown encoding")


def _without_mark(head: bytes) -> str | None:
    """UTF-16 or UTF-32 without a byte-order mark. In UTF-16, the high byte varies less than the low one."""
    variety = [(len(set(head[half::2])), -head[half::2].count(0)) for half in (0, 1)]
    order = ["utf-16-be", "utf-16-le"] if variety[0] < variety[1] else ["utf-16-le", "utf-16-be"]
    for encoding in ("utf-32-le", "utf-32-be", *order):
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(head)
        except UnicodeError:
            continue
        odd = sum(not (character.isprintable() or character.isspace()) for character in text)
        if odd <= len(text) // 100:
            return encoding
    return None


def _count_wrong(stream: BinaryIO, encoding: Encoding) -> tuple[int, int]:
    """How many characters of a file are wrong in an encoding, and how many are not ASCII (wrong ones included)."""
    wrong = other = 0
    for piece in pieces(stream, encoding):
        wrong += piece.count("\ufffd")
        other += len(piece) - len(piece.encode("ascii", "ignore"))
    return wrong, other


def _sample(stream: BinaryIO, fault: int) -> bytes:
    """Lines that are not ASCII, from where the file stops being UTF-8. ASCII lines tell nothing."""
    stream.seek(fault)
    data = stream.read(SAMPLE_BYTES)
    begin = data.find(b"\n") + 1 if fault else 0  # do not begin or end inside a character
    end = (data.rfind(b"\n") + 1 or len(data.rstrip(NOT_ASCII))) if stream.read(1) else len(data)
    return _not_ascii(data[begin:end]) or _not_ascii(data)


def _not_ascii(data: bytes) -> bytes:
    return b"".join(line for line in data.splitlines(keepends=True) if not line.isascii())


def _outside_tags(data: bytes) -> bytes:
    """The text of markup, a line for the text between two tags."""
    before, *chunks = data.split(b"<")
    found, hidden = [before], b""
    for chunk in chunks:
        tag, _, text = chunk.partition(b">")
        name = tag[:8].lower()
        if hidden and not name.startswith(b"/" + hidden):
            continue
        hidden = next((each for each in (b"script", b"style") if name.startswith(each)), b"")
        if not hidden:
            found.append(text)
    return _not_ascii(b"\n".join(found) + b"\n")


def _guesses(sample: bytes) -> Iterator[str]:
    """Encodings that the sample may be in, best first."""
    is_short = len(sample) - len(sample.translate(None, NOT_ASCII)) <= FEW_BYTES
    is_usual = _share_of_a_language(sample.decode(LIKELY[0], "replace")) == 1
    if is_usual and is_short:
        yield LIKELY[0]
    import charset_normalizer

    found = {(-50, 1.0, 0.0, 0)} if is_usual else set()  # charset-normalizer refuses signs without letters
    for match in charset_normalizer.from_bytes(sample, steps=20, cp_isolation=LIKELY):
        share = _share_of_a_language(str(match))
        if not is_short and _is_unclear(str(match)):
            continue
        for name in match.could_be_from_charset:
            if name in LIKELY:  # first how little it looks like a mess, then how much like a language
                place = -round(50 * max(share, CLEAR))
                coherence = match.coherence + (0.05 if name == LIKELY[0] else 0.0)
                found.add((place, round(match.chaos, 2), -round(coherence, 2), LIKELY.index(name)))
    for *_, rank in sorted(found):
        yield LIKELY[rank]


def _is_unclear(text: str) -> bool:
    """Whether the letters belong to no language. Other signs tell nothing."""
    known = PUNCTUATION | THAI
    letters = (each for each in text[:JUDGED_CHARACTERS] if each.isascii() or each.isalpha() or each in known)
    return _share_of_a_language("".join(letters)) < UNCLEAR


def _share_of_a_language(text: str) -> float:
    """The share of the non-ASCII characters that belongs to one language, the best one. A character at an impossible
    place belongs to none: a capital letter or a quote inside a word, a letter among those of another script."""
    letters: Counter[str] = Counter()
    marks = other = 0
    for before, character, after in zip(" " + text, text[:JUDGED_CHARACTERS], text[1:] + " ", strict=False):
        if character.isascii():
            continue
        other += 1
        if not _is_in_place(before, character, after):
            continue
        if character in PUNCTUATION:
            marks += 1
        else:
            letters[character.lower()] += 1
    found = [sum(letters[letter] for letter in letters.keys() & alphabet) for alphabet in _alphabets()]
    for alphabet in OTHERS.split():
        num_frequent, num_all = (sum(letters[letter] for letter in some) for some in (alphabet[:FREQUENT], alphabet))
        found.append(int(num_all * min(1.0, num_frequent / max(1, num_all) / LEAST_FREQUENT)))
    return (marks + max(found)) / other if other else 1.0


def _is_in_place(before: str, character: str, after: str) -> bool:
    """Whether a character may stand between these two."""
    is_inside, is_alone = before.isalpha() and after.isalpha(), before.isascii() and after.isascii()
    if character in INSIDE_WORDS:
        return True
    if character in PUNCTUATION:
        return not is_inside or (character > "\u3000" and not is_alone)
    if character.isupper() and (before.islower() or (is_inside and after.islower())):
        return False
    if "\u0370" <= character < "\u0530":  # Greek and Cyrillic
        return not any(each.isascii() and each.isalpha() for each in (before, after))
    if "\u0530" <= character < "\u1000":  # Hebrew to Thai, where no word is a letter
        return not is_alone
    return character < "\u0370" or not (is_inside and is_alone)


@cache
def _alphabets() -> tuple[frozenset[str], ...]:
    """The letters of each language; of those with thousands, the usual ones, which encodings keep together."""

    def usual(codec: str, first: int, last: int) -> frozenset[str]:
        pairs = (bytes((high, low)) for high in range(first, last + 1) for low in range(0x40, 0xFF))
        return frozenset(pair.decode(codec, "ignore") for pair in pairs)

    chinese, taiwanese, korean = usual("gb2312", 0xB0, 0xD7), usual("big5", 0xA4, 0xC6), usual("euc_kr", 0xB0, 0xC8)
    japanese = usual("euc_jp", 0xA4, 0xA5) | usual("euc_jp", 0xB0, 0xCF)
    return (*map(frozenset, LATIN.split()), THAI, chinese, taiwanese, korean, japanese)
