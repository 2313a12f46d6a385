"""Settings in files: YAML and JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .base import ConfigError
from .resolving import resolve
from .sections import RunConfig


def read_config(path: Path) -> dict[str, Any]:
    """Nested settings from a YAML or JSON file, not checked yet."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, and no config; to train on it, say --data {path}")
    if not path.is_file():
        raise ConfigError(f"the config {path} does not exist; give a .yaml or .json file")
    if path.stat().st_size > 2**20:
        raise ConfigError(f"the config {path} has {path.stat().st_size} bytes; need at most a million")
    try:
        text = path.read_text(encoding="utf-8")
        is_json = path.suffix == ".json"
        values = json.loads(text, parse_float=_number, object_pairs_hook=_unique) if is_json else read_yaml(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the config {path} cannot be read: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"the config {path} holds no settings; need sections such as\ntrain:\n  steps: 1000")
    return values


# Settings that have always been in the config.json of a run: without one of them, the file is damaged.
REQUIRED_OF_A_RUN = {"model": ("kind", "d_model"), "data": ("path",), "optim": ("lr",), "train": ("batch_tokens",)}


def read_run_config(run: Path) -> dict[str, Any]:
    """The settings of a run, checked."""
    path = run / "config.json"
    stored = read_config(path)
    try:
        resolve(stored)
        for section, names in REQUIRED_OF_A_RUN.items():
            for name in names:
                if name not in (stored.get(section) or {}):
                    raise ConfigError(f"{section}.{name} is missing")
    except ConfigError as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    return stored


def read_yaml(text: str) -> Any:
    """YAML's plain values; 3e-4 and 1e6 are numbers, as in YAML 1.2."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _unique([(self.construct_object(key, deep=True), None) for key, _ in node.value])
            return super().construct_mapping(node, deep)

    with_exponent = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)$")
    Loader.add_implicit_resolver("!number", with_exponent, list("-+.0123456789"))
    Loader.add_constructor("!number", lambda loader, node: _number(node.value))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Settings by name. One that is given twice would win over the first silently."""
    for number, (name, _) in enumerate(pairs):
        if any(name == other for other, _ in pairs[:number]):
            raise ValueError(f"{name} is there twice")
    return dict(pairs)


def _number(text: str) -> int | float:
    """A decimal number; an int if it has an exponent and is whole: 1e6 tokens are a count."""
    value = float(text)
    return int(value) if "e" in text.lower() and value.is_integer() and abs(value) < 2**53 else value


def write_yaml(config: RunConfig) -> str:
    """The config as a file that `read_config` reads."""
    import yaml

    text: str = yaml.safe_dump(config.to_json(), sort_keys=False, allow_unicode=True)
    return text
