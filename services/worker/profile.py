"""`python -m services.worker.profile HOST:PORT --iterations K`: orders a torch profile of a stage's
next iterations, and prints the name of the written file.

Operators run the program in a worker's pod. With mutual TLS it presents the worker's certificate.
The worker's setting `profile_dir` must be set.
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path

import grpc
import grpc.aio
from orcinus.v1 import worker_pb2, worker_pb2_grpc

from services.common import tls
from services.common.settings import PREFIX


async def take(arguments: argparse.Namespace) -> int:
    """Orders the profile, waits until it is written, and returns the exit status."""
    connect = tls.connector(arguments.tls_dir, role=tls.WORKER)
    async with connect(arguments.address) as channel:
        request = worker_pb2.ProfileRequest(
            n_iterations=arguments.iterations, tp_rank=arguments.tp_rank
        )
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            response = await stub.Profile(request, timeout=arguments.timeout)
        except grpc.aio.AioRpcError as error:
            sys.stderr.write(f"{error.code().name}: {error.details()}\n")
            return 1
    sys.stdout.write(f"{response.path}\n")
    return 0


def main() -> int:
    """Reads the command line, orders the profile and returns the exit status."""
    parser = argparse.ArgumentParser(prog="profile", description="Has a stage write a profile.")
    parser.add_argument("address", metavar="HOST:PORT", help="where the stage's controller listens")
    parser.add_argument("--iterations", type=int, default=10, metavar="K", help="%(default)s")
    parser.add_argument("--tp-rank", type=int, default=0, metavar="R", help="%(default)s")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds to wait (%(default)s)"
    )
    tls_dir = os.environ.get(f"{PREFIX}TLS_DIR")
    parser.add_argument(
        "--tls-dir", type=Path, default=Path(tls_dir) if tls_dir else None, metavar="DIR"
    )
    return asyncio.run(take(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
