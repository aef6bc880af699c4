"""Answers of a server that break off are no figures."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from scripts.benchmarks.server_load import Load, run_round

PIECE = {"choices": [{"delta": {"content": "a"}}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 3}}
ERROR = {"error": {"message": "the engine has stopped", "code": 500}}


class Server(ThreadingHTTPServer):
    """Answers each request with the same events."""

    events: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Server)
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in self.server.events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server: Server) -> list[int]:
    address = f"http://127.0.0.1:{server.server_port}"
    return [each.tokens for each in run_round(address, "model", ["x"], Load(users=1), 8).replies]


def test_the_tokens_of_an_answer_are_the_servers_count(server: Server) -> None:
    server.events = [PIECE, USAGE]
    assert ask(server) == [3]


@pytest.mark.parametrize("before", [[], [PIECE]])
def test_an_error_within_an_answer(server: Server, before: list[dict[str, Any]]) -> None:
    server.events = [*before, ERROR]
    with pytest.raises(RuntimeError, match=r"broke off an answer.*the engine has stopped"):
        ask(server)


def test_an_answer_without_its_number_of_tokens(server: Server) -> None:
    server.events = [PIECE]
    with pytest.raises(RuntimeError, match="without the number of its tokens"):
        ask(server)
