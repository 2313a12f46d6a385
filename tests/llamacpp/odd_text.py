"""Lines of text that tokenizers find hard: scripts, emoji, spaces, digits, controls, contractions, in any mixture."""

from __future__ import annotations

import random
import sys
import unicodedata

WORDS = (
    "the", "Hello", "it's", "I'LL", "we've", "don't", "'twas", "x'", "rock'n'roll", "naïve", "Straße", "ŒUVRE", "ﬁne",
    "123", "1,234.5", "0x7f", "٣٤٥", "४२", "²³", "Ⅻ", "½", "1️⃣", "3rd", "v2.0", "2026-11-16",
    "日本語", "中文字", "한국어", "แมว", "עברית", "العربية", "हिन्दी", "தமிழ்", "Ελληνικά", "Русский", "ქართული", "ᚠᚢᚦ",
    "👍", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇳🇱", "👋🏽", "☃", "\u200d", "\ufe0f", "\u00ad", "\ufeff", "\ufffd", "\ue000", "\U000f0000",
    "...", "!?", "—", "“q”", "«»", "==", "->", "</s>", "<|endoftext|>", "<|padding|>", "[PAD7]", "$\\alpha$", "#", "@x",
    "def f(x):", "a_b", "C:\\dir", "http://a.b/c?d=e&f", "a\u0301", "e\u0308\u0323", "\u0301", "𝔘𝔫𝔦", "𐍈", "ǅ", "İ",
)  # fmt: skip
SPACES = (" ", " ", " ", "", "  ", "    ", " " * 23, " " * 26, "\t", "\t\t", "\r", "\u00a0", "\u2003", "\u3000", "\u2028", "\u0085", "\x0b\x0c", "\u200b", "\u180e", " \u00a0 ", "\n", "\n\n", " \n ")  # fmt: skip
CONTROLS = tuple(map(chr, (*range(1, 9), 0xE, 0x1B, 0x1C, 0x1D, 0x1E, 0x1F, 0x7F, 0x80, 0x9F, 0x2060, 0x202E)))


def odd_lines(count: int, seed: int = 0) -> list[str]:
    """In NFC, the same for a seed and a version of Unicode."""
    draw = random.Random(seed)
    assigned = [chr(n) for n in range(32, sys.maxunicode) if unicodedata.category(chr(n)) not in ("Cn", "Cs", "Co")]
    lines = []
    for _ in range(count):
        parts = []
        for _ in range(draw.randrange(1, 24)):
            kind = draw.random()
            if kind < 0.75:
                parts.append(draw.choice(WORDS))
            elif kind < 0.95:
                parts.append("".join(draw.choices(assigned, k=draw.randrange(1, 5))))
            else:
                parts.append(draw.choice(CONTROLS))
            parts.append(draw.choice(SPACES))
        lines.append(unicodedata.normalize("NFC", "".join(parts)))
    return lines
