"""Text from a model: rows that are continued together, a token at a time."""

from .batching import Continuation, continue_texts
from .conversation import Conversation
from .decoder import Decoder, Memory, Saved, Token
from .generate import generate_batch, generate_text, generate_tokens, row_seed
from .sampling import Choice, Sampling
from .saving import read_row, write_row
from .text import NewText, Prompt, whole_texts

__all__ = [
    "Choice", "Continuation", "Conversation", "Decoder", "Memory", "NewText", "Prompt", "Sampling", "Saved", "Token",
    "continue_texts", "generate_batch", "generate_text", "generate_tokens", "read_row", "row_seed", "whole_texts",
    "write_row",
]  # fmt: skip
