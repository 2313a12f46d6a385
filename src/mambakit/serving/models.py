"""The models of a server: one, or the checkpoints of a run, each loaded when it is first asked for."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from ..checkpoint import CheckpointError
from ..checkpoint.loading import read_chat_template
from ..checkpoint.native import checkpoints, find
from ..decoding import generate_tokens, whole_texts
from ..device import DTYPES, choose_device
from ..files import UserError
from ..loaded import load
from ..model import MambaLM
from ..model.int8 import quantize_
from .chat import ChatTemplate
from .settings import ApiError, Settings


@dataclass(eq=False)
class ServedModel:
    """A model that is in memory."""

    id: str
    key: str  # of this time that it is in memory
    model: MambaLM
    tokenizer: Tokenizer
    end_tokens: tuple[int, ...]
    template: ChatTemplate | None
    num_users: int = 0


class Models:
    """At most `max_models` are in memory. For a further one, the one that was not used for longest is given up."""

    def __init__(self, settings: Settings, forget: Callable[[str], None]) -> None:
        self.settings, self._forget = settings, forget
        self.path = settings.path.resolve()
        self.device = choose_device(settings.device)
        self.vocab_size = 0  # of the default model
        self._held: OrderedDict[str, ServedModel] = OrderedDict()
        self._loading = asyncio.Lock()
        self._numbers = itertools.count()

    @property
    def is_run(self) -> bool:
        return (self.path / "checkpoints").is_dir()

    @property
    def default(self) -> str:
        """The id of the model that a request means which names none."""
        if self.path.parent.name == "checkpoints":
            return f"{self.path.parent.parent.name}/{self.path.name}"
        return self.path.stem if self.path.is_file() else self.path.name

    def load_default(self) -> None:
        """A model that cannot be used is noticed before the server begins."""
        served = self._held[self.default] = self._open(self.default, self.path)
        self.vocab_size = served.model.config.vocab_size
        for _ in generate_tokens(served.model, [0], max_new_tokens=2):
            pass  # kernels are compiled now, not for the first client

    def places(self) -> dict[str, Path]:
        """By id, the default first."""
        steps = checkpoints(self.path) if self.is_run else []
        return {self.default: self.path, **{f"{self.default}/{folder.name}": folder for folder in steps}}

    def held(self) -> list[str]:
        return list(self._held)

    def no_such(self, model_id: str) -> ApiError:
        places = self.places()
        names = ", ".join([*places][:5]) + (", …" if len(places) > 5 else "")
        message = f"there is no model {model_id!r} here; the models are {names} (GET /v1/models)"
        return ApiError(404, message, param="model", code="model_not_found")

    @contextlib.asynccontextmanager
    async def use(self, model_id: str | None) -> AsyncIterator[ServedModel]:
        """A model that stays in memory inside the block."""
        name = model_id or self.default
        if name not in self._held:
            async with self._loading:
                if name not in self._held:
                    await self._load(name)
        served = self._held[name]
        self._held.move_to_end(name)
        served.num_users += 1
        try:
            yield served
        finally:
            served.num_users -= 1

    async def _load(self, name: str) -> None:
        place = self.places().get(name)
        if place is None:
            raise self.no_such(name)
        while len(self._held) >= self.settings.max_models:
            idle = next((each for each, served in self._held.items() if not served.num_users), None)
            if idle is None:
                message = f"{len(self._held)} models are in use, as many as --max-models allows; try again later"
                raise ApiError(503, message, param="model", code="models_busy")
            self._forget(self._held.pop(idle).key)
        try:
            self._held[name] = await asyncio.to_thread(self._open, name, place)
        except UserError as error:
            raise ApiError(
                500, f"the model {name} cannot be used: {error}", param="model", code="model_damaged"
            ) from None

    def _open(self, name: str, path: Path) -> ServedModel:
        place = find(path)
        dtype = None if self.settings.dtype == "auto" else DTYPES[self.settings.dtype]
        loaded = load(place, dtype=dtype)
        if loaded.tokenizer is None:
            raise CheckpointError(f"{place} has no tokenizer.json, which a server needs; put it there")
        model = loaded.model.requires_grad_(False)
        if self.settings.int8:
            quantize_(model)
        model.to(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        template = ChatTemplate.of(*found) if (found := read_chat_template(place)) else None
        return ServedModel(
            name, f"{name} {next(self._numbers)}", model, whole_texts(loaded.tokenizer), loaded.end_tokens, template
        )
