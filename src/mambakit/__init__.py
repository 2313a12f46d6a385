"""mambakit trains Mamba language models.

`mambakit.prepare` makes shards of text, and `mambakit.train` a model of shards or text (`training_steps` step by step);
`evaluate` (`evaluate_tasks` for its --tasks), `report`, `convert` and `save` are what the commands of these names are:
`mambakit --help`.
`mambakit.ModelConfig` describes a model, `mambakit.MambaLM` is one, `mambakit.load` opens a run or a folder with one,
and `mambakit.ops` has the operators they are made of.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import ops
    from .checkpoint import convert, save
    from .config import ConfigError, ModelConfig, RunConfig
    from .data.prepare import documents, prepare
    from .evaluation import evaluate, evaluate_tasks
    from .loaded import load
    from .model import MambaLM, State
    from .reporting import report
    from .training import train, training_steps

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "MambaLM",
    "ModelConfig",
    "RunConfig",
    "State",
    "__version__",
    "convert",
    "documents",
    "evaluate",
    "evaluate_tasks",
    "load",
    "ops",
    "prepare",
    "report",
    "save",
    "train",
    "training_steps",
]

# By their modules; torch is loaded when the first name that needs it is used.
_NAMES = {
    "checkpoint": ("convert", "save"),
    "config": ("ConfigError", "ModelConfig", "RunConfig"),
    "data.prepare": ("documents", "prepare"),
    "evaluation": ("evaluate", "evaluate_tasks"),
    "loaded": ("load",),
    "model": ("MambaLM", "State"),
    "reporting": ("report",),
    "training": ("train", "training_steps"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "ops":
        return importlib.import_module(".ops", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module 'mambakit' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
