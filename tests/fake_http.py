"""An HTTP server of a test, whose handlers may hold a connection until the test ends."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def serving_http(
    handler: type[BaseHTTPRequestHandler], *, released: threading.Event, **attributes: Any
) -> Iterator[str]:
    """Serves on a free port until the end of the block, and yields the URL. Handlers have
    `attributes`; `released` is set before their ends are waited for."""
    bound = type("Handler", (handler,), attributes)
    with ThreadingHTTPServer(("127.0.0.1", 0), bound) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            released.set()
            server.shutdown()
            thread.join()
