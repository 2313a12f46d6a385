"""From one form of a model to another."""

from __future__ import annotations

from pathlib import Path

from ..files import new_folder
from . import huggingface, native, state_spaces
from .files import CheckpointError
from .loading import load

FORMS = ("huggingface", "state-spaces", "native")


def convert(source: str | Path, target: str | Path, to: str) -> None:
    """Write the model of a folder or run in another form. Weights keep their bits."""
    if to not in FORMS:
        raise CheckpointError(f"a model cannot be written as {to!r}; choose one of {', '.join(FORMS)}")
    loaded = load(native.find(Path(source), substitute=False))
    if to == "huggingface":
        huggingface.write(loaded.model, Path(target), tokenizer=loaded.tokenizer, end_tokens=loaded.end_tokens)
    elif to == "state-spaces":
        state_spaces.write(loaded.model, Path(target), tokenizer=loaded.tokenizer)
    else:
        with new_folder(Path(target), CheckpointError) as beside:
            huggingface.write_into(beside, loaded.model, loaded.tokenizer, loaded.end_tokens)
            native.write_manifest(beside)
