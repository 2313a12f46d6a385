"""What a person may choose of a server, and the errors that its clients get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..files import UserError

MAX_PROMPTS, MAX_ANSWERS = 32, 16  # in one request: prompts, and answers to each

STATES = ("save_state", "restore_state")  # parameters that need --states


@dataclass(frozen=True)
class Settings:
    """Limits have units in their names; times are in seconds."""

    path: Path
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    int8: bool = False
    max_prompt_tokens: int = 16384
    max_new_tokens: int = 4096
    max_concurrent: int = 64
    max_queue: int = 256
    max_body_kb: int = 1024
    max_models: int = 2
    prefix_cache_mb: int = 512
    timeout: float = 300.0
    read_timeout: float = 10.0
    grace: float = 30.0
    states: Path | None = None

    def __post_init__(self) -> None:
        lowest = {"port": 0, "max_queue": 0, "prefix_cache_mb": 0, "grace": 0}
        for field in fields(self):
            value, least = getattr(self, field.name), lowest.get(field.name, 1)
            flag = f"--{field.name.replace('_', '-')}"
            if isinstance(value, float) and not (value >= 0 and (value > 0 or least == 0)):
                raise UserError(f"{flag} {value:g}: need a number of seconds above 0")
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise UserError(f"{flag} {value}: need at least {least}")
        if self.port > 65535:
            raise UserError(f"--port {self.port}: need at most 65535")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise UserError("--api-key (or MAMBAKIT_API_KEY) is empty, or has characters that no HTTP header can carry")


class ApiError(Exception):
    """An answer that says what is wrong, in OpenAI's form."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {**(headers or {})}
        if status in (429, 503):
            self.headers.setdefault("Retry-After", "1")

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
