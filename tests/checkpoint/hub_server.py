"""A stand-in for the hub on this machine: model info, file lists, and files by revision."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repo:
    """Files by commit, and the commits that tags and branches name."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False
    token: str | None = None  # the one that is let in, if not all are


@dataclass
class HubServer:
    """Serves `repos` from 127.0.0.1 while entered.

    Attributes:
        repos: by id.
        requests: method and path of all so far; files that were sent whole are in `sent`.
        cut: files whose body breaks off in the middle, with how: "close" or "reset". Each once.
        status: answer everything with it.
        hang: answer nothing until the server is left.
        body: answer everything with it, as a network that wants a login does.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    cut: dict[str, str] = field(default_factory=dict)
    status: int | None = None
    hang: bool = False
    body: bytes | None = None

    def __enter__(self) -> HubServer:
        self.closing = threading.Event()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        """Refuse connections from now on."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.0"  # one request a connection: stopping leaves none open

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        hub.requests.append(f"{self.command} {path}")
        sent = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        hub.tokens.update({sent} - {""})
        if hub.hang:
            hub.closing.wait(20)
            return
        if hub.status is not None:
            return self._send(hub.status, b"", {"X-Error-Message": f"no, {sent}"})
        if hub.body is not None:
            return self._send(200, hub.body, {})
        api, file = _API.fullmatch(path), _FILE.fullmatch(path)
        match = api or file
        repo = hub.repos.get(match[1]) if match else None
        refused = repo is not None and repo.token is not None and repo.token != sent
        if match is None or repo is None or (refused and not repo.gated):
            # as the hub does: whoever is not logged in does not learn what exists
            return self._send(404 if sent else 401, b"", {"X-Error-Code": "RepoNotFound"})
        revision = unquote((api[3] or "main") if api else match[2])
        commit = repo.refs.get(revision, revision)
        files = repo.commits.get(commit)
        if files is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if file:
            if refused:
                return self._send(401, b"", {"X-Error-Code": "GatedRepo"})
            return self._send_file(commit, files, unquote(file[3]))
        if api and api[2] == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(body), "oid": _digest(body)}
                for name, body in files.items()
            ]
            return self._send(200, json.dumps(entries).encode(), {})
        siblings = [{"rfilename": name, "size": len(body)} for name, body in files.items()]
        info = {"id": match[1], "sha": commit, "siblings": siblings}
        return self._send(200, json.dumps(info).encode(), {})

    def _send_file(self, commit: str, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        body, status = files[name], 200
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_digest(body)}"'}
        wanted = self.headers.get("Range")
        if wanted:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            self.hub.ranges.append(f"{name} from {start}")
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            body, status = body[start:], 206
        how = self.hub.cut.pop(name, None) if self.command == "GET" else None
        self._send(status, body, headers, how)
        if self.command == "GET" and how is None:
            self.hub.sent.append(name)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], cut: str | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut == "reset":
            self.wfile.flush()
            now = struct.pack("ii", 1, 0)  # linger for no time: a reset, not an orderly end
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
            self.connection.close()


def _digest(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()
