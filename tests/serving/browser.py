"""A page in headless Chromium, driven over a pipe by the Chrome DevTools protocol: mouse and keys are real events."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runs import wait_for

SECONDS = 60  # for an answer of the browser, and for what a page is to do
OPTIONS = [
    "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--password-store=basic", "--use-mock-keychain",
]  # fmt: skip
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "ArrowRight": (39, "")}
CONTROL = 2


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Chromium, with a new profile in this folder."""
    program = chromium()
    assert program is not None, "Chromium is not installed; make test-serving installs Debian's"
    # Chromium reads commands from descriptor 3 and writes to 4.
    command = [
        "sh",
        "-c",
        'exec "$@" 3<&0 4>&1 </dev/null >&2',
        "sh",
        program,
        *OPTIONS,
        f"--user-data-dir={folder}/profile",
    ]
    with (folder / "chromium.log").open("w") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0, start_new_session=True
        )
    try:
        yield Browser(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


class Browser:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._rest = b""
        self._count = 0
        self._pages: dict[str, Page] = {}

    def open(self, address: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> Page:
        """A new window, with storage of its own."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, context, address)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.load()
        return page

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The answer to one command. Events that come before it go to their pages."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params} | ({"sessionId": session} if session else {})
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        while True:
            got = self._read()
            if got.get("id") == self._count:
                assert "error" not in got, f"{method}: {got['error']}"
                answer: dict[str, Any] = got["result"]
                return answer
            if (page := self._pages.get(got.get("sessionId", ""))) is not None:
                page.note(got["method"], got["params"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            block = self._process.stdout.read(1 << 20)
            assert block, "Chromium has ended; see chromium.log in the test's folder"
            self._rest += block
        line, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message


class Page:
    def __init__(self, browser: Browser, session: str, context: str, address: str) -> None:
        self._browser, self._session, self.context, self.address = browser, session, context, address
        self.requests: list[str] = []
        self.complaints: list[str] = []  # what a developer would see in red

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def load(self) -> None:
        """Load the page, or load it again."""
        self.call("Page.navigate", url=self.address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self.context)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def value(self, script: str) -> Any:
        """Of an expression, or of a promise."""
        got = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, f"{script}: {got['exceptionDetails']}"
        return got["result"].get("value")

    def wait(self, condition: str) -> None:
        wait_for(lambda: bool(self.value(condition)), SECONDS)

    def text(self, selector: str) -> str:
        """What a person reads there."""
        shown: str = self.value(f"document.querySelector({json.dumps(selector)}).innerText")
        return shown

    def click(self, selector: str) -> None:
        """A press of the mouse in the middle of an element, which must be in sight and not covered by another."""
        x, y, is_free = self.value(f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{ block: "nearest", behavior: "instant" }});
            const box = element.getBoundingClientRect();
            const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
            const top = document.elementFromPoint(x, y);
            return [x, y, element === top || element.contains(top)];
        }})()""")
        assert is_free, f"{selector} is out of sight or covered"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, modifiers: int = 0) -> None:
        code, text = KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, selector: str, text: str) -> None:
        """Put this text in place of what a field has."""
        field = f"document.querySelector({json.dumps(selector)})"
        assert self.value(f"{field}.focus(), {field}.select(), {field} === document.activeElement"), (
            f"{selector} is not there"
        )
        self.call("Input.insertText", text=text)
        if not text:
            self.call("Input.dispatchKeyEvent", type="keyDown", key="Delete", code="Delete", windowsVirtualKeyCode=46)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option, as its popup would: headless Chromium shows none."""
        self.value(f"""(() => {{
            const field = document.querySelector({json.dumps(selector)});
            field.value = {json.dumps(value)};
            for (const name of ["input", "change"]) field.dispatchEvent(new Event(name, {{ bubbles: true }}));
        }})()""")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
