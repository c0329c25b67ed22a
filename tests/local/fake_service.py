"""`python -m tests.local.fake_service`: a service that reports an address and then, as its options
say, serves, ends, or hangs without ending."""

import argparse
import asyncio
import os
import signal
import socket
import sys

from services.common import process
from services.common.ending import give_up


async def serve(arguments: argparse.Namespace) -> int:
    """Listens, reports the address, and then ends, hangs or serves."""
    host, _, port = arguments.address.rpartition(":")
    with socket.create_server((host, int(port))) as listener:
        pipe = process.ReadyPipe(arguments.ready_fd)
        pipe.report({"address": f"{host}:{listener.getsockname()[1]}", "pid": os.getpid()})
        if arguments.then == "die":
            return 3
        if arguments.then == "give-up":
            return give_up("address: why\nnot", ready_fd=arguments.ready_fd)
        pipe.report({"ready": True})
        if arguments.then == "lose":
            pipe.report({"ready": False})
            return 5
        if arguments.then == "hang":
            await asyncio.sleep(0.1)
            signal.pause()
        await process.stop_event().wait()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--turn-fd", type=int)
    parser.add_argument("--spare", choices=("waits", "dies"), default="waits")
    parser.add_argument(
        "--then", choices=("serve", "die", "give-up", "hang", "lose"), required=True
    )
    arguments = parser.parse_args()
    if arguments.spare == "dies" and arguments.turn_fd is not None:
        return 4
    process.wait_for_turn(arguments.turn_fd, ready_fd=arguments.ready_fd)
    return process.run(serve(arguments), ready_fd=arguments.ready_fd)


if __name__ == "__main__":
    sys.exit(main())
