"""Servers that tests ask: of small models, on a free port of this machine."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from helpers import small_model
from runs import wait_for

from mambakit import save
from mambakit.data.tokenize import bytes_tokenizer, vocab_size
from mambakit.serving.server import listening, make_server
from mambakit.serving.service import Service
from mambakit.serving.settings import Settings

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LONG = 200_000  # tokens that no test waits for


def make_model(
    folder: Path, *, seed: int = 0, template: str | None = TEMPLATE, to: str = "huggingface", end: float = 0.0
) -> Path:
    """A model of bytes with random weights. Its likeliest token is never the end of the text."""
    torch.manual_seed(seed)
    tokenizer = bytes_tokenizer()
    model = small_model("mamba2", vocab_size=vocab_size(tokenizer))
    with torch.no_grad():
        model.backbone.embedding.weight[tokenizer.token_to_id("<|endoftext|>")] = end
    save(model, folder, tokenizer=tokenizer, to=to)
    if template is not None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return folder


def make_run(folder: Path, num_steps: int, broken: int = 0) -> Path:
    """A run with checkpoints of several steps, each with other weights; those of one step are not finite."""
    for step in range(1, num_steps + 1):
        value = math.nan if step == broken else 0.0
        make_model(folder / "checkpoints" / f"step_{step:08d}", seed=step, template=None, to="native", end=value)
    return folder


class Running:
    """A server, and plain requests to it."""

    def __init__(self, service: Service, port: int) -> None:
        self.service, self.port = service, port
        self.address = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.address, timeout=60, trust_env=False)

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=body)

    def text(self, **body: Any) -> str:
        answer = self.complete(**body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def num_running(self) -> int:
        return int(self.http.get("/health").json()["running"])

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"mambakit_{name} ")).split()[1])

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@contextlib.contextmanager
def serving(path: Path, **settings: Any) -> Iterator[Running]:
    """A server in a thread of this process."""
    chosen = replace(Settings(path, port=0, device="cpu", max_new_tokens=LONG), **settings)
    with listening(chosen) as listener:
        service = Service(chosen)
        service.models.load_default()
        server = make_server(service)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        running = Running(service, listener.getsockname()[1])
        try:
            wait_for(lambda: server.started, 30)
            yield running
        finally:
            running.http.close()
            server.should_exit = True
            thread.join()
