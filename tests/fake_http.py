"""An HTTP server of a test, whose handlers may hold a connection until the test ends."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def serving_http(
    handler: type[BaseHTTPRequestHandler],
    *,
    released: threading.Event,
    tls: ssl.SSLContext | None = None,
    **attributes: Any,
) -> Iterator[str]:
    """Serves on a free port until the end of the block, and yields the URL. Handlers get
    `attributes` as attributes of their class. At the end of the block, `released` is set, so that
    handlers that wait for it end, and the server then waits for its handlers. With `tls`, the URL
    has the host `localhost`."""
    bound = type("Handler", (handler,), attributes)
    with ThreadingHTTPServer(("127.0.0.1", 0), bound) as server:
        server.daemon_threads = True
        if tls is not None:
            # The handshake is left to the handler's thread, so that no client stops the others.
            server.socket = tls.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            host = "http://127.0.0.1" if tls is None else "https://localhost"
            yield f"{host}:{server.server_port}"
        finally:
            released.set()
            server.shutdown()
            thread.join()
