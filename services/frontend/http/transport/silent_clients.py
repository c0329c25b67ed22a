"""Ends the connections of clients whose host has been silent for too long.

A host that has lost its power or its network cannot close its connections.
"""

import socket
import sys


def notice_silence(listener: socket.socket, limit_s: float) -> None:
    """Sets a timeout on the connections of a listener. The kernel ends a connection if the client's
    host has acknowledged neither data nor keepalive probes for `limit_s` seconds.

    On systems other than Linux, the longer limits of the kernel apply.
    """
    if sys.platform != "linux":
        return
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit_s * 1000))
    for when in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        listener.setsockopt(socket.IPPROTO_TCP, when, max(1, int(limit_s / 4)))
