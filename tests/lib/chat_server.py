"""An OpenAI-compatible server on this machine whose replies, or lack of them, a test decides."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

HANG = object()  # send no reply until the server closes


def completion(text, finish_reason="stop", prompt_tokens=10, completion_tokens=5, **message):
    """Return the body of a chat completion."""
    return {
        "model": "tiny-1",
        "system_fingerprint": "fp",
        "choices": [{"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens},
    }


@contextmanager
def chat_server(reply, models=None):
    """Serve `reply(request)`: a text, a body, (status, body), (status, body, headers), raw bytes, or HANG.

    With models, another model gets a 404, as from OpenAI. Yields url, requests (their bodies in order), paths, headers,
    and busy, the most requests that were open at once.
    """
    seen = SimpleNamespace(requests=[], paths=[], headers=[], busy=0, url="")
    lock, closing, open_now = threading.Lock(), threading.Event(), set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            found = self.path == "/v1/models"
            self._send(200 if found else 404, {"data": [{"id": name} for name in models or ("tiny",)]}, {})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                seen.requests.append(body)
                seen.paths.append(self.path)
                seen.headers.append(self.headers)
                open_now.add(self)
                seen.busy = max(seen.busy, len(open_now))
            try:
                is_known = models is None or body["model"] in models
                found = reply(body) if is_known else (404, {"error": {"message": "no such model"}})
                if found is HANG:
                    closing.wait()
                    self.close_connection = True
                    return
                if isinstance(found, bytes):  # a broken reply: send these bytes and close
                    self.wfile.write(found)
                    self.close_connection = True
                    return
                found = found if isinstance(found, tuple) else (200, found)
                status, content, *headers = found
                if isinstance(content, str):
                    chat = self.path.endswith("/chat/completions")
                    content = completion(content) if chat else {"choices": [{"text": content, "finish_reason": "stop"}]}
                self._send(status, content, *headers or [{}])
            finally:
                with lock:
                    open_now.discard(self)

        def _send(self, status, body, headers):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", "Content-Length": len(data), **headers}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # stopped or killed clients leave broken requests
    threading.Thread(target=server.serve_forever, daemon=True).start()
    seen.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield seen
    finally:
        closing.set()
        server.shutdown()
        server.server_close()


def slowly(reply, seconds):
    """Return `reply` after a number of seconds, so that requests overlap."""

    def later(request):
        time.sleep(seconds)
        return reply(request)

    return later
