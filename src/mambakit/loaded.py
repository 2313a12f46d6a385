"""A model that was opened, ready to generate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch

from . import checkpoint
from .checkpoint import CheckpointError, ModelFolder
from .decoding import Continuation, Conversation, continue_texts, generate_text, generate_tokens
from .model.int8 import quantize_

if TYPE_CHECKING:
    from tokenizers import Tokenizer


__all__ = ["Conversation", "LoadedModel", "load"]


class LoadedModel(ModelFolder):
    """What a folder holds: the model, its tokenizer and the tokens that end a text."""

    @overload
    def generate(self, prompt: str, **options: Any) -> str: ...
    @overload
    def generate(self, prompt: list[str], **options: Any) -> list[str]: ...
    @overload
    def generate(self, prompt: Sequence[int], **options: Any) -> list[int]: ...
    def generate(self, prompt: str | list[str] | Sequence[int], **options: Any) -> str | list[str] | list[int]:
        """What follows: text for a text, texts for a list of texts, token ids for token ids.

        Options as for `generate_text`, or for `generate_batch` with token ids. Ends before an end token.
        """
        if isinstance(prompt, str):
            return "".join(self.stream(prompt, **options))
        prompts = [part for part in prompt if isinstance(part, str)]
        tokens = [part for part in prompt if not isinstance(part, str)]
        if prompts and tokens:
            raise ValueError(f"the prompt {prompt!r} mixes texts and token ids; give a list of one kind")
        if prompts:
            texts = [""] * len(prompts)
            for row, piece in self._text(prompts, options):
                texts[row] += piece
            return texts
        if options.pop("stop_strings", ()):
            raise ValueError("stop_strings end a text, but the prompt is token ids; give a text, or token ids as stop")
        return list(generate_tokens(self.model, tokens, **{"stop": self.end_tokens, **options}))

    def stream(self, prompt: str, **options: Any) -> Iterator[str]:
        """The text that follows, in pieces, as it is generated. Options as for `generate_text`."""
        return (piece for _, piece in self._text([prompt], options))

    def continue_texts(self, prompts: Sequence[str], **options: Any) -> Iterator[Continuation]:
        """What follows each prompt, as each ends; `batch_size` of them at a time. Other options as for `generate`."""
        return continue_texts(self.model, self._tokenizer(), prompts, end_tokens=self.end_tokens, **options)

    def conversation(self, **settings: Any) -> Conversation:
        """A text that is written in turns, and can be put to disk."""
        return Conversation(self.model, self._tokenizer(), self.end_tokens, **settings)

    def _text(self, prompts: list[str], options: dict[str, Any]) -> Iterator[tuple[int, str]]:
        return generate_text(self.model, self._tokenizer(), prompts, end_tokens=self.end_tokens, **options)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            why = "this model has no tokenizer.json; put it into its folder, or give the prompt as token ids, in Python"
            raise CheckpointError(why)
        return self.tokenizer


def load(path: str | Path, *, dtype: torch.dtype | None = None, int8: bool = False) -> LoadedModel:
    """Open a run, of which the best checkpoint is taken, or a model folder of any form that `convert` reads.

    A checkpoint with wrong checksums is refused. Weights keep the dtype they are stored in unless `dtype` is given;
    A_log, D and dt bias are always fp32. `int8` puts the large matrices into 8 bits, fewer to read for each token;
    the model can no longer be trained or saved.
    """
    found = checkpoint.load(path, dtype=dtype)
    if int8:
        quantize_(found.model)
    return LoadedModel(found.model, found.tokenizer, found.end_tokens)
