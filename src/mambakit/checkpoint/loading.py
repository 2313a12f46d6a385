"""Opening a folder that holds a model, whatever its form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch

from ..model import MambaLM
from . import huggingface, state_spaces
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
    def generate(self, prompt: Sequence[int], **options: Any) -> list[int]: ...
    def generate(self, prompt: str | Sequence[int], **options: Any) -> str | list[int]:
        """What follows the prompt: text for a text, token ids for token ids. Options as for `generate_tokens`."""
        from ..generate import generate_tokens

        options.setdefault("stop", self.end_tokens)
        if not isinstance(prompt, str):
            return list(generate_tokens(self.model, prompt, **options))
        if self.tokenizer is None:
            raise CheckpointError("this model has no tokenizer.json; give the prompt as token ids")
        tokens = list(generate_tokens(self.model, self.tokenizer.encode(prompt).ids, **options))
        return str(self.tokenizer.decode(tokens))


def load(path: str | Path, *, dtype: torch.dtype | None = None) -> LoadedModel:
    """Open a folder in Hugging Face's or state-spaces' form.

    Weights keep the dtype they are stored in unless `dtype` says otherwise; A_log, D and dt bias are fp32 always.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder that holds config.json and the weights")
    values = read_json(folder / "config.json")
    if state_spaces.is_state_spaces(values):
        model = state_spaces.read(folder, dtype)
    else:
        model = huggingface.read(folder, dtype)
    return LoadedModel(
        model.eval(), _read_tokenizer(folder / "tokenizer.json"), _end_tokens(values.get("eos_token_id"))
    )


def _end_tokens(eos: Any) -> tuple[int, ...]:
    """eos_token_id of config.json: absent, one token, or several."""
    return tuple(token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int))


def _read_tokenizer(path: Path) -> Tokenizer | None:
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from None
