"""A stand-in of the Hugging Face Hub: the requests of an upload by huggingface_hub, over LFS as without hf_xet."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FORBIDDEN = "other"  # a user in whose name the token must not write


@dataclass
class Hub:
    """The repositories of a server, and what it was asked.

    Attributes:
        url: its address.
        files: {repository: {path: content}}.
        visibility: {repository: "private" or "public"}.
        tokens: the authorization headers of all requests.
    """

    url: str
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    visibility: dict[str, str] = field(default_factory=dict)
    tokens: set[str | None] = field(default_factory=set)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the JSON of a request."""
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(preupload|commit|tree)/main)?", path.partition("?")[0])
        repo, action = (match[1], match[2]) if match else (None, None)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if asked["organization"] == FORBIDDEN:
                return 403, {"error": f"You don't have the rights to create a model under the namespace {FORBIDDEN}"}
            is_new = self.visibility.setdefault(name, asked["visibility"]) and name not in self.files
            self.files.setdefault(name, {})
            return (200 if is_new else 409), {"url": f"{self.url}/{name}", "id": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if method == "PUT" and path.startswith("/blobs/"):
            self.blobs[path.rpartition("/")[2]] = body
            return 200, {}
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.url}/blobs/{each['oid']}", "header": {}}}}
                for each in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if repo not in self.files:
            return 404, {"error": "Repository not found"}
        if action == "tree":
            return 200, [{"type": "file", "path": p, "size": len(b), "oid": "0"} for p, b in self.files[repo].items()]
        if action == "preupload":
            paths = [each["path"] for each in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith((".safetensors", "tokenizer.json")) else "regular" for path in paths}
            return 200, {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
        if action == "commit":
            self.commit(self.files[repo], map(json.loads, body.splitlines()))
            return 200, {"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.url}/{repo}/commit/{'1' * 40}"}
        return 200, {"id": repo, "private": self.visibility[repo] == "private", "sha": "1" * 40, "siblings": []}

    def commit(self, files: dict[str, bytes], lines: Iterator[dict[str, Any]]) -> None:
        """Apply the lines of a commit."""
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                blob = self.blobs[value["oid"]]
                assert hashlib.sha256(blob).hexdigest() == value["oid"]
                files[value["path"]] = blob
            elif line["key"] == "deletedFile":
                del files[value["path"]]


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve a hub on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.tokens.add(self.headers.get("Authorization"))
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = hub.answer(self.command, self.path, body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if status == 403:
                self.send_header("X-Error-Message", answer["error"])
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_PUT = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
