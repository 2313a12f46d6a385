"""Opening a folder that holds a model, whatever its form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch

from ..config import ModelConfig
from ..files import path_of
from ..model import MambaLM
from . import huggingface, native, state_spaces
from .files import CheckpointError, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model, its tokenizer where the folder has one, and the tokens that end a text where those are known."""

    model: MambaLM
    tokenizer: Tokenizer | None
    end_tokens: tuple[int, ...] = ()

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
        from ..generate import generate_tokens

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

    def _text(self, prompts: list[str], options: dict[str, Any]) -> Iterator[tuple[int, str]]:
        from ..generate import generate_text

        if self.tokenizer is None:
            raise CheckpointError("this model has no tokenizer.json; give the prompt as token ids")
        return generate_text(self.model, self.tokenizer, prompts, end_tokens=self.end_tokens, **options)


def load(path: str | Path, *, dtype: torch.dtype | None = None) -> LoadedModel:
    """Open a run, of which the best checkpoint is taken, or a folder in Hugging Face's or state-spaces' form.

    A checkpoint whose checksums do not hold is refused. Weights keep the dtype they are stored in unless `dtype` says
    otherwise; A_log, D and dt bias are fp32 always.
    """
    folder = native.find(path_of(path))
    is_of_run = native.is_checkpoint(folder)
    values = read_json(folder / "config.json")
    if state_spaces.is_state_spaces(values):
        model = state_spaces.read(folder, dtype)
    else:
        model = huggingface.read(folder, dtype)
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    if is_of_run and not native.is_checkpoint(folder):
        raise CheckpointError(f"{folder} was deleted while it was read, perhaps by the run that goes on; try again")
    return LoadedModel(model.eval(), tokenizer, _end_tokens(values.get("eos_token_id")))


def read_config(path: str | Path) -> ModelConfig:
    """What model a folder holds, without its weights."""
    values = read_json(Path(path) / "config.json")
    if state_spaces.is_state_spaces(values):
        return state_spaces.config_from_state_spaces(values)
    return huggingface.config_from_huggingface(values)


def _end_tokens(eos: Any) -> tuple[int, ...]:
    """eos_token_id of config.json: absent, one token, or several."""
    return tuple(token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int))


def _read_tokenizer(path: Path) -> Tokenizer | None:
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from None
    tokenizer.no_truncation()  # some files carry a length that a prompt would be cut or filled up to
    tokenizer.no_padding()
    return tokenizer
