"""One checked config from several layers of settings."""

from __future__ import annotations

import contextlib
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from .. import presets
from .base import ConfigError, Settings, by_name, unknown_setting
from .model import UNKNOWN_VOCABULARY
from .sections import SECTIONS, RunConfig, TrainConfig, problems_between


def resolve(*layers: Mapping[str, Any], vocab_size: int | None = None) -> RunConfig:
    """One checked config from layers of nested settings, of which later ones win.

    Besides the sections, `recipe` names a preset of optimization, and `model: NAME` or `model.preset` one of a model.
    `vocab_size` is that of the data's tokenizer, for a model that does not set its own.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for layer in ({"model": "small"}, *layers):
        given = _without_presets(layer, problems)
        model = layer.get("model")
        # A model by name replaces the one before completely.
        if isinstance(model, str) or (isinstance(model, Mapping) and model.get("preset") is not None):
            values.pop("model", None)
        values = merge(values, given)
    model = values.get("model") or {}
    if isinstance(model, Mapping) and model.get("vocab_size") is None:
        values["model"] = {**model, "vocab_size": vocab_size or UNKNOWN_VOCABULARY}
    problems += [unknown_setting(name, {**SECTIONS, "recipe": None}) for name in values if name not in SECTIONS]
    sections: dict[str, Settings] = {}
    for name, section in SECTIONS.items():
        given = values.get(name) or {}
        if not isinstance(given, Mapping):
            first = next(iter(section.model_fields))
            problems.append(f"{name}={reprlib.repr(given)}: need settings, such as {name}: {{{first}: …}}")
            continue
        try:
            sections[name] = section(**given)
        except ConfigError as error:
            problems += [f"{name}.{problem}" for problem in error.problems]
            right = {key: value for key, value in given.items() if not _is_named(key, error.problems)}
            with contextlib.suppress(ConfigError):  # the correct ones may still not fit other sections
                sections[name] = section(**right)
    problems += problems_between(sections)
    if problems:
        raise ConfigError(*problems)
    checked: dict[str, Any] = dict(sections)
    return RunConfig(**checked)


def _is_named(key: str, problems: Sequence[str]) -> bool:
    return any(re.match(rf"{re.escape(key)}\b", problem) for problem in problems)


def _without_presets(layer: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """A layer with the presets that it names filled in; what it sets itself wins."""
    values = dict(layer)
    recipe = values.pop("recipe", None)
    if isinstance(values.get("model"), str):  # `model: NAME`
        values["model"] = {"preset": values["model"]}
    if isinstance(values.get("data"), (str, list, tuple)):  # `data: PATH`
        values["data"] = {"path": values["data"]}
    model = dict(values["model"]) if isinstance(values.get("model"), Mapping) else {}
    preset = model.pop("preset", None)
    try:
        if preset is not None:
            known = dict(by_name("model preset", preset, presets.MODELS))
            del known["vocab_size"]
            values["model"] = {**known, **model}
    except ConfigError as error:
        problems += error.problems
        values["model"] = {**presets.MODELS["small"], **model}
    try:
        if recipe is not None:
            values = merge(by_name("recipe", recipe, presets.RECIPES), values)
    except ConfigError as error:
        problems += error.problems
    return values


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings; those of `over` win. A length of the run replaces any other length."""
    merged = dict(base)
    for name, value in over.items():
        if value is None:  # a section without settings, as in a file with all its lines commented out
            continue
        if isinstance(value, Mapping) and isinstance(merged.get(name), Mapping):
            section = dict(merged[name])
            if name == "train" and any(value.get(length) is not None for length in TrainConfig.LENGTHS):
                section = {key: kept for key, kept in section.items() if key not in TrainConfig.LENGTHS}
            merged[name] = {**section, **value}
        else:
            merged[name] = value
    return merged
