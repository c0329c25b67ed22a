"""What `helm test` runs, against servers that answer and servers that do not."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler, TCPServer
from threading import Thread

from k8s.chart.chart import STATIC
from tests.limits import HANG_S

ANSWERS: Mapping[str, object] = {
    "/ready": {},
    "/v1/models": {"data": [{"id": "demo"}]},
    "/v1/completions": {"choices": [{"text": " there"}]},
}


@contextmanager
def server(statuses: Mapping[str, int]) -> Iterator[str]:
    """A frontend that answers some paths with other statuses than 200."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(statuses.get(self.path, 200))
            self.end_headers()
            self.wfile.write(json.dumps(ANSWERS[self.path]).encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as listening:
        thread = Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def ask(url: str) -> subprocess.CompletedProcess[str]:
    """Runs the program."""
    return subprocess.run(
        [sys.executable, "-c", (STATIC / "files" / "answers.py").read_text("utf-8"), url],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_a_frontend_that_answers_passes() -> None:
    with server({}) as url:
        done = ask(url)
    assert done.returncode == 0, done.stderr
    assert "demo answers: ' there'" in done.stdout


def test_a_frontend_that_wants_a_key_passes() -> None:
    with server({"/v1/models": 401}) as url:
        done = ask(url)
    assert done.returncode == 0
    assert "API key" in done.stdout


def test_a_frontend_that_is_not_ready_fails() -> None:
    with server({"/ready": 503}) as url:
        done = ask(url)
    assert done.returncode == 1
    assert "503" in done.stderr


def test_a_frontend_that_is_not_there_fails() -> None:
    done = ask("http://127.0.0.1:1")
    assert done.returncode == 1
    assert "does not answer" in done.stderr


def test_an_answer_that_is_no_http_fails() -> None:
    class Stranger(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1024)
            self.request.sendall(b"SSH-2.0\n")

    with TCPServer(("127.0.0.1", 0), Stranger) as listening:
        thread = Thread(target=listening.handle_request)
        thread.start()
        done = ask(f"http://127.0.0.1:{listening.server_address[1]}")
        thread.join()
    assert done.returncode == 1
    assert "does not answer" in done.stderr
