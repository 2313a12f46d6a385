"""Text from a model: rows that are continued together, a token at a time."""

from .decoder import Decoder, Memory, Saved, Token
from .generate import generate_batch, generate_text, generate_tokens, whole_texts
from .sampling import Choice, Sampling

__all__ = [
    "Choice", "Decoder", "Memory", "Sampling", "Saved", "Token", "generate_batch", "generate_text", "generate_tokens",
    "whole_texts",
]  # fmt: skip
