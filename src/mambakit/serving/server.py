"""The process: a socket, connections that must ask in time, and an end that finishes what is running."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..files import UserError
from ..progress import say
from .app import make_app
from .service import Service
from .settings import ApiError, Settings

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SWITCH_SECONDS = 0.0005  # how long a thread may keep Python from the other: the engine's steps take about as long


def serve(settings: Settings) -> int:
    """Serve until a signal comes. 0: all that was running is finished; 1: --grace was not enough for it."""
    with listening(settings) as listener:
        service = Service(settings)
        service.models.load_default()
        host, port = listener.getsockname()[:2]
        place = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if settings.api_key is None and host not in ("127.0.0.1", "::1"):
            say(f"--host {settings.host}: whoever reaches this machine can use the model; --api-key asks for a key")
        sys.setswitchinterval(SWITCH_SECONDS)
        server = make_server(service)
        say(f"serving {service.models.default} at {place} (API at {place}/v1); Ctrl-C ends it")
        try:
            server.run(sockets=[listener])
        finally:
            service.engine.stop()
    if server.num_cut:
        say(f"{server.num_cut} requests were cut off; --grace SECONDS gives them more time")
    return 1 if server.num_cut else 0


def make_server(service: Service) -> Server:
    settings = service.settings
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings are about what clients do
    return Server(
        uvicorn.Config(
            make_app(service), http=_protocol(settings.read_timeout), ws="none", lifespan="on", log_config=None,
            access_log=False, server_header=False, timeout_graceful_shutdown=math.ceil(settings.grace),
        )
    )  # fmt: skip


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            why = f"--host {settings.host} --port {settings.port} cannot be listened at: {error.strerror}"
            raise UserError(f"{why}; choose another port, or 0 for any that is free") from None
        listener.listen(2048)
        yield listener


class Server(uvicorn.Server):
    """uvicorn's server, which sends itself the signal again after its end; here the command ends as it should."""

    num_cut = 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        is_main = threading.current_thread() is threading.main_thread()  # others may not handle signals
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS if is_main}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            say(f"{signal.Signals(number).name}: finishing what is running; once more ends it at once")
        self.handle_exit(number, frame)

    async def _wait_tasks_to_complete(self) -> None:
        try:
            await super()._wait_tasks_to_complete()
        finally:
            self.num_cut = len(self.server_state.tasks)


def _protocol(seconds: float) -> type[H11Protocol]:
    """uvicorn's HTTP/1.1, in which the head of a request must arrive within so many seconds."""

    class TimedProtocol(H11Protocol):
        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:
                self._wait_for_head()
            else:
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait_for_head(self) -> None:
            if self.timer is None:
                self.timer = self.loop.call_later(seconds, self._too_slow)

        def _stop_waiting(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

        def _too_slow(self) -> None:
            message = f"the request did not arrive within {seconds:g} s (--read-timeout of the server)"
            body = json.dumps(ApiError(408, message, code="request_timeout").body()).encode()
            head = f"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
            self.transport.close()

    return TimedProtocol
