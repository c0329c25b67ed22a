"""A collector for tests: takes spans over OTLP and gRPC, and writes them to the pod's log.

Every export becomes one line of JSON, from which the message can be made again. It runs in the
frontend's image, and does not interpret the spans.
"""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.json_format import MessageToJson
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

ADDRESS = "0.0.0.0:4317"


class TraceLog:
    """Writes the spans that come to standard output, one writer at a time."""

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """OTLP's one method."""
        sys.stdout.write(MessageToJson(request, indent=None) + "\n")
        sys.stdout.flush()
        return trace_service_pb2.ExportTraceServiceResponse()


def main() -> None:
    """Receives until the pod is stopped."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before there are other threads
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(TraceLog(), server)
    server.add_insecure_port(ADDRESS)
    server.start()
    signal.sigwait({signal.SIGTERM})
    server.stop(None).wait()


if __name__ == "__main__":
    main()
