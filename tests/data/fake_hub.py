"""A hub of datasets on this machine: as much of the real one's protocol as reading a dataset of JSON Lines takes.

Each repository has commits, of which `main` is the last; `moves_after` has main move on by itself after so many
requests for content, as it does when somebody pushes while a dataset is being read.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

Files = dict[str, bytes]


class FakeHub:
    def __init__(self, name: str, commits: list[Files], moves_after: int | None = None) -> None:
        self.name, self.commits, self.moves_after = name, commits, moves_after
        self.main = 0
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer()

            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self._answer(body)

            def _answer(self, body: bytes = b"") -> None:
                status, headers, data = hub.answer(self.path, body, self.headers.get("Range"))
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def commit(self, number: int) -> str:
        return hashlib.sha1(f"{self.name} {number}".encode()).hexdigest()

    def answer(self, path: str, body: bytes, range_: str | None) -> tuple[int, dict[str, str], bytes]:
        path = path.partition("?")[0].replace("%2F", "/").replace("%3A", ":")
        self.requests.append(path)
        found = re.fullmatch(rf"/api/datasets/{self.name}(?:/(revision|tree|paths-info)/([^/]+)(/.*)?)?", path)
        content = re.fullmatch(rf"/datasets/{self.name}/resolve/([^/]+)/(.+)", path)
        number = self._number((content[1] if content else found[2] if found else None) or "main")
        if number is None or not (found or content):
            return 404, {"X-Error-Code": "RepoNotFound" if number is not None else "RevisionNotFound"}, b"{}"
        files, commit = self.commits[number], self.commit(number)
        if content:
            return self._content(files, commit, content[2], range_)
        assert found
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        if found[1] == "tree":
            if found[3]:  # there are no folders
                return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"{}"
            value: object = entries
        elif found[1] == "paths-info":
            wanted = body.decode()
            value = [entry for entry in entries if str(entry["path"]) in wanted]
        else:
            siblings = [{"rfilename": name} for name in files]
            value = {"id": self.name, "sha": commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
        return 200, {"Content-Type": "application/json", "X-Repo-Commit": commit}, json.dumps(value).encode()

    def _number(self, revision: str) -> int | None:
        if revision == "main":
            return self.main
        return next((n for n in range(len(self.commits)) if revision in (self.commit(n), f"v{n}")), None)

    def _content(self, files: Files, commit: str, name: str, range_: str | None) -> tuple[int, dict[str, str], bytes]:
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        if self.moves_after is not None and name.endswith(".jsonl"):
            self.moves_after -= 1
            if self.moves_after == 0:
                self.main = len(self.commits) - 1
        data = files[name]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        if range_:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", range_).groups()  # type: ignore[union-attr]
            end = min(int(last or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{end}/{len(data)}"
            return 206, headers, data[int(first) : end + 1]
        return 200, headers, data

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.server.shutdown()
        self.server.server_close()
