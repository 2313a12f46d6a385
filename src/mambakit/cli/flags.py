"""Flags for settings, made from the fields of the config; and what was typed, as settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from tyro.conf import Positional, arg

from ..config import SECTIONS, PrepareConfig, read_yaml
from ..presets import MODELS

words: list[str] = []  # all that was typed, for processes that are started with the same


def flag(help: str | None = None, metavar: str | None = None) -> Any:
    """A flag without its default in the help. A help longer than a line stands in the docstring of the command."""
    return arg(metavar=metavar, help=help, help_behavior_hint="")


def _all_flags() -> Any:
    """A type with a flag --section.field for every setting; those that are not given are not in it."""
    sections = {}
    for section, settings in SECTIONS.items():
        by_preset = {name for preset in MODELS.values() for name in preset} if section == "model" else set()
        flags = {name: _setting(field, name in by_preset) for name, field in settings.model_fields.items()}
        if section == "model":
            flags["preset"] = Annotated[str, arg(metavar="NAME", help="a model by name; the same as --model NAME")]
        sections[section] = TypedDict(f"{section.capitalize()}Flags", flags, total=False)  # type: ignore[operator]
    return TypedDict("SettingsFlags", sections, total=False)  # type: ignore[operator]


def _prepare_flags() -> Any:
    """A type with a flag --field for every option of prepare; those that are not given are not in it."""
    fields = PrepareConfig.model_fields
    flags = {name: _setting(field, is_switch=field.annotation is bool) for name, field in fields.items()}
    return TypedDict("PrepareFlags", flags, total=False)  # type: ignore[operator]


def _setting(field: FieldInfo, by_preset: bool = False, is_switch: bool = False) -> Any:
    """A flag whose value is text: the config reads it as YAML and checks it with all the others. A switch has none."""
    parts = get_args(field.annotation) if get_origin(field.annotation) is tuple else ()
    several: Any = tuple[str, ...] if Ellipsis in parts else tuple[str, str]  # which is all that there are
    kind = bool if is_switch else several if parts else str
    return Annotated[kind, _described(field, by_preset, None if is_switch else _metavar(field.annotation))]


def _described(field: FieldInfo, by_preset: bool, metavar: str | None) -> Any:
    hint = "the preset's" if by_preset or field.default is PydanticUndefined else _plain(field.default)
    return arg(metavar=metavar, help=field.description or "", help_behavior_hint=f"(default: {hint})")


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(str(part) for part in value) or "none"
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _metavar(annotation: Any) -> str:
    parts = (annotation, *get_args(annotation))
    if choices := [part for part in parts if get_origin(part) is Literal]:
        return "{" + ",".join((*get_args(choices[0]), *(("true", "false") if bool in parts else ()))) + "}"
    if get_origin(annotation) is tuple and Ellipsis not in parts:
        return " ".join(_metavar(get_args(part)[0] if get_args(part) else part) for part in get_args(annotation))
    names = {int: "INT", float: "FLOAT", bool: "BOOL", str: "TEXT"}
    inner = [names[part] for part in parts if part in names]
    return inner[0] if inner else "VALUE"


def flat(words: Words) -> list[str]:
    return [word for several in words for word in several]


def typed_settings(flags: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What was typed, as settings."""
    return {
        section: typed_section(values, SECTIONS[section].model_fields) for section, values in flags.items() if values
    }


def typed_section(flags: Mapping[str, Any], fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    """What was typed, as settings of one section."""
    given: dict[str, Any] = {}
    for name, value in flags.items():
        annotation = fields[name].annotation if name in fields else str  # model.preset is no field
        several = [_value(word, get_args(annotation)[0]) for word in value] if isinstance(value, tuple) else None
        given[name] = several if several is not None else _value(value, annotation)
    return given


def _value(text: str | bool, annotation: Any) -> Any:
    """What a flag's text means: itself for settings that are text, else as in a config file."""
    if isinstance(text, bool):  # a switch
        return text
    parts = get_args(annotation) if get_origin(annotation) is not Literal else ()
    if annotation is str or str in parts:
        return None if text == "null" and type(None) in parts else text
    try:
        return read_yaml(text)
    except ValueError:
        return text


if TYPE_CHECKING:
    SettingsFlags = Mapping[str, Mapping[str, Any]]
    PrepareFlags = Mapping[str, Any]
else:
    SettingsFlags = _all_flags()
    PrepareFlags = _prepare_flags()
# Words that may follow one another, and may follow the flag given again.
Words = tuple[tuple[str, ...], ...]
Json = Annotated[bool, flag("print the result as JSON, for programs")]
Checkpoint = Annotated[
    Positional[Path],
    arg(metavar="CHECKPOINT|RUN", help="a model folder, or a run, of which the best checkpoint is taken"),
]
TextColumn = Annotated[str | None, _described(PrepareConfig.model_fields["text_column"], False, "TEXT")]
Separator = Annotated[str | None, _described(PrepareConfig.model_fields["separator"], False, "TEXT")]
WHERE = "where to compute: auto, cpu, cuda, mps, or another kind of device that torch has here"
Device = Annotated[str, arg(help=WHERE, metavar="DEVICE")]
