"""A conversation as the text that a model was trained on: by the template in the model's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..files import UserError, pip_command


class ChatTemplate:
    """A template of jinja2, as transformers writes them. It runs in a sandbox: it comes with the weights."""

    def __init__(self, template: Any, tokens: Mapping[str, str]) -> None:
        self._template, self._tokens = template, tokens

    @classmethod
    def of(cls, source: str, tokens: Mapping[str, str]) -> ChatTemplate:
        """`tokens` are special ones that the template may name, such as eos_token."""
        try:
            from jinja2 import TemplateError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise UserError(f"chat templates need jinja2: {pip_command('serve')}") from None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _refuse
        try:
            return cls(environment.from_string(source), tokens)
        except TemplateError as error:
            raise UserError(f"the model's chat template is not valid: {error}") from None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text up to where the answer begins."""
        try:
            return str(self._template.render(messages=list(messages), add_generation_prompt=True, **self._tokens))
        except UserError:
            raise
        except Exception as error:  # a template may fail in any way
            raise UserError(f"the model's chat template refuses these messages: {error}") from None


def _refuse(message: str) -> None:
    raise UserError(f"the model's chat template refuses these messages: {message}")
