"""A small OpenAI-compatible server on this machine, which answers from a function and keeps its requests."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Asked = tuple[str, dict[str, Any]]  # path, body


@contextmanager
def answer_server(answer: Callable[[dict[str, Any]], str], models: Sequence[str]) -> Iterator[tuple[str, list[Asked]]]:
    """Yield the base URL and the requests so far; an unknown model gets a 404, as from OpenAI."""
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/v1/models"
            self._send(200 if found else 404, {"object": "list", "data": [{"id": name} for name in models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            if body["model"] not in models:
                self._send(404, {"error": {"message": "no such model"}})
            elif self.path == "/v1/chat/completions":
                message = {"role": "assistant", "content": answer(body)}
                self._send(200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
            else:
                self._send(200, {"choices": [{"index": 0, "text": answer(body), "finish_reason": "stop"}]})

        def _send(self, code: int, body: dict[str, Any]) -> None:
            text = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
    finally:
        server.shutdown()
        server.server_close()
