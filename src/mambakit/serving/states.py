"""States of rows that requests save and restore by name, as files that `mambakit generate` reads too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ..decoding import Choice, Saved, read_row, write_row
from ..files import UserError, path_of
from ..model import MambaLM, State
from .settings import ApiError

MAX_STATES = 1000  # in a folder
SUFFIX = ".safetensors"


class States:
    def __init__(self, folder: Path) -> None:
        self.folder = path_of(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--states {folder} cannot be written in: {error.strerror}; choose another place") from None

    def check_free(self, name: str) -> None:
        if self._path(name).exists():
            message = f"there is a state {name!r} already; choose another name, or remove the old one on the server"
            raise ApiError(409, message, param="save_state", code="state_exists")
        if sum(1 for _ in self.folder.glob(f"*{SUFFIX}")) >= MAX_STATES:
            message = f"the server has {MAX_STATES} states, as many as it keeps; remove old ones from its folder"
            raise ApiError(409, message, param="save_state", code="too_many_states")

    def read(self, name: str, model: MambaLM) -> Saved:
        path = self._path(name)
        if not path.is_file():
            raise ApiError(404, f"there is no state {name!r} here", param="restore_state", code="state_not_found")
        try:
            return read_row(path, model)
        except UserError as error:
            message = str(error).replace(str(path), f"the state {name!r}")
            raise ApiError(400, message, param="restore_state", code="invalid_state") from None

    def write(self, name: str, model: MambaLM, choice: Choice, state: State, tokens: Sequence[int]) -> None:
        """`state` is before the last of the tokens."""
        vocab_size = model.config.vocab_size
        seen = torch.zeros(vocab_size, dtype=torch.bool)
        seen[[token for token in tokens if token < vocab_size]] = True
        self.check_free(name)
        write_row(self._path(name), Saved(state, tokens[-1], choice, len(tokens), seen, tokens), model)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"
