"""The command `serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from ..files import UserError, path_of, pip_command
from .flags import Checkpoint, Device, flag


def serve(
    checkpoint: Checkpoint,
    /,
    host: Annotated[str, arg(help="where to listen; 0.0.0.0 is all of this machine's addresses")] = "127.0.0.1",
    port: Annotated[int, arg(help="0 takes one that is free")] = 8000,
    api_key: Annotated[str | None, flag("clients must send it; $MAMBAKIT_API_KEY unless set", "KEY")] = None,
    device: Device = "auto",
    dtype: Annotated[Literal["auto", "fp32", "bf16", "fp16"], arg(help="of the weights; auto: as stored")] = "auto",
    int8: Annotated[bool, flag("weights of 8 bits: half the memory of bf16, nearly the same answers")] = False,
    max_prompt_tokens: Annotated[int, arg(help="longest prompt")] = 16384,
    max_new_tokens: Annotated[int, arg(help="longest answer")] = 4096,
    max_concurrent: Annotated[int, arg(help="answers that are generated at once")] = 64,
    max_queue: Annotated[int, arg(help="answers that may wait; further ones get status 429")] = 256,
    max_body_kb: Annotated[int, arg(help="largest request")] = 1024,
    max_models: Annotated[int, arg(help="checkpoints of a run in memory at once")] = 2,
    prefix_cache_mb: Annotated[int, arg(help="memory for beginnings of prompts that were read; 0 keeps none")] = 512,
    timeout: Annotated[float, arg(metavar="SECONDS", help="an answer ends after this time, complete or not")] = 300.0,
    read_timeout: Annotated[float, arg(metavar="SECONDS", help="a request must arrive within this time")] = 10.0,
    grace: Annotated[float, arg(metavar="SECONDS", help="for what is running when the server is to end")] = 30.0,
    states: Annotated[Path | None, flag("where requests may save and restore states", "DIR")] = None,
) -> int:
    """Serve a model over HTTP, as OpenAI's API does, with a page to try it in.

    The server has /v1/completions, /v1/chat/completions and /v1/models, /health and /metrics (Prometheus), and the page
    at /. Of a run, every checkpoint can be asked for by name: RUN/step_00001000. SIGTERM or Ctrl-C lets it finish what
    is running.

    For example:
      mambakit serve run
      mambakit serve run --port 8080 --max-new-tokens 512
      MAMBAKIT_API_KEY=secret mambakit serve model --host 0.0.0.0
    """
    try:
        from ..serving.server import serve as run
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("fastapi", "starlette", "uvicorn", "h11"):
            raise
        raise UserError(f"serve needs fastapi and uvicorn: {pip_command('serve')}") from None
    from ..serving.settings import Settings

    key = api_key if api_key is not None else os.environ.get("MAMBAKIT_API_KEY")
    return run(
        Settings(
            path_of(checkpoint), host, port, key, device, dtype, int8, max_prompt_tokens, max_new_tokens,
            max_concurrent, max_queue, max_body_kb, max_models, prefix_cache_mb, timeout, read_timeout, grace, states,
        )
    )  # fmt: skip
