"""`python -m services.common.healthcheck HOST:PORT SERVICE`: asks a process for its health. `make
status` and Docker's health checks run this command.

The exit status is 0 if the service is serving. Otherwise it is 1, with the reason on standard
error. The program does not use TLS, so HOST:PORT must be the address that serves only health. A
health check starts this program every few seconds, so it imports few modules.
"""

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

DIRECTLY = [("grpc.enable_http_proxy", 0)]
"""Options of the gRPC channel. The channel uses no proxy, even if environment variables name one.
"""


def reason_against(address: str, service: str, timeout_s: float) -> str | None:
    """Returns the reason why `service` at `address` is not healthy, or None if it is healthy."""
    with grpc.insecure_channel(address, options=DIRECTLY) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    if response.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def main() -> int:
    """Requests the health once. Returns the exit status of the program."""
    parser = argparse.ArgumentParser(prog="healthcheck", description="Asks for a service's health.")
    parser.add_argument("address", metavar="HOST:PORT", help="where health is told, without TLS")
    parser.add_argument("service", help="name that the process tells its health under")
    parser.add_argument(
        "--timeout", type=float, default=3.0, metavar="S", help="seconds (%(default)s)"
    )
    arguments = parser.parse_args()
    reason = reason_against(arguments.address, arguments.service, arguments.timeout)
    if reason is None:
        return 0
    sys.stderr.write(f"{arguments.service} at {arguments.address}: {reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
