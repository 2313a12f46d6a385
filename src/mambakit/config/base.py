"""What all settings share: sections that are frozen and checked, and messages that name every problem."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ..files import UserError


class ConfigError(UserError):
    """A person's mistake in a config. The message names every problem found."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        lines = "\n".join(f"  {line}" for line in problems)
        super().__init__(problems[0] if len(problems) == 1 else f"{len(problems)} problems:\n{lines}")


class Settings(BaseModel):
    """A section of settings: frozen, no unknown keys, and all problems in one message."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(*_explain(error, type(self))) from None

    def problems(self) -> Iterator[str]:
        """Settings that are right one by one, but do not fit together."""
        return iter(())

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        if problems := list(self.problems()):
            raise ValueError("\n".join(problems))
        return self


def _explain(error: ValidationError, section: type[BaseModel]) -> Iterator[str]:
    """Every problem of a validation: what was given, what is needed, what to do."""
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            yield unknown_setting(name, section.model_fields)
        elif problem["type"] == "missing":
            yield f"{name} is missing; give it, or start from a preset"
        elif problem["type"] == "value_error":
            yield from str(problem["ctx"]["error"]).splitlines()
        else:
            need = problem["msg"].replace("Input should be", "need").replace("a valid integer", "a whole number")
            yield f"{name}={reprlib.repr(problem['input'])}: {need}"


def unknown_setting(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    return f"{name} is not a setting; {hint}"


def by_name(what: str, name: Any, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """A preset by its name."""
    if not isinstance(name, str) or name not in known:
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"no {what} is called {reprlib.repr(name)}; {hint}Known: {', '.join(known)}")
    return known[name]
