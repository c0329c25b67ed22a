"""Sets up OpenTelemetry's SDK, which makes and sends spans, as OpenTelemetry's environment
variables say.

The SDK reads variables while it is imported. So this module must be imported only if traces are on,
and after `otel_variables` has found no error. Spans leave by OTLP, over gRPC or HTTP. Neither uses
a proxy.
"""

import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

import grpc
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler

from services.common import otel_variables
from services.common.otel_variables import otlp_value
from services.common.span_export import BoundedSpanProcessor

_COMPRESSIONS = {
    "none": grpc.Compression.NoCompression,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}


def new_provider(
    service_name: str, *, decides: bool, max_links: int
) -> tuple[TracerProvider, SpanExporter]:
    """Returns the tracer provider of this process, and the provider's exporter.

    `service_name` is used unless the environment variables set a name. If `decides` is true, every
    trace that begins in this process is recorded, unless the environment variables select a sampler
    that records nothing. If `decides` is false, the sampler in the environment variables decides.
    """
    # Propagators would write a line for each malformed header of a client.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    exporter = _exporter(os.environ)
    provider = TracerProvider(
        sampler=_own_decisions() if decides else None,
        resource=_resource(service_name),
        shutdown_on_exit=False,
        span_limits=_limits(max_links),
        meter_provider=NoOpMeterProvider(),
    )
    queue = BoundedSpanProcessor(
        exporter,
        endpoint=otlp_value(os.environ, "ENDPOINT"),
        max_queue_size=int(os.environ.get(otel_variables.QUEUE, otel_variables.QUEUE_SIZE)),
    )
    provider.add_span_processor(queue)
    return provider, exporter


def _exporter(environment: Mapping[str, str]) -> SpanExporter:
    """Returns the exporter for the protocol that the environment variables select. Only the module
    of this exporter is imported."""
    if otel_variables.protocol(environment) == otel_variables.HTTP:
        return _http_exporter()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(
        credentials=_credentials(environment),
        compression=_COMPRESSIONS[otlp_value(environment, "COMPRESSION").lower() or "none"],
        channel_options=(("grpc.enable_http_proxy", 0),),  # type: ignore[arg-type]
        meter_provider=NoOpMeterProvider(),
    )


def _http_exporter() -> SpanExporter:
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    session = requests.Session()
    session.trust_env = False  # no proxy
    return OTLPSpanExporter(session=session, meter_provider=NoOpMeterProvider())


def _credentials(environment: Mapping[str, str]) -> grpc.ChannelCredentials | None:
    """Returns the credentials in the files that environment variables name. Returns None if no
    variable names a file."""
    names = ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
    paths = [otlp_value(environment, name) for name in names]
    if not any(paths):
        return None
    return grpc.ssl_channel_credentials(
        *(Path(path).read_bytes() if path else None for path in paths)
    )


def _own_decisions() -> Sampler | None:
    """Returns a sampler that records every trace that begins in this process. Returns None if the
    sampler in the environment records nothing; then that sampler is used."""
    name = os.environ.get("OTEL_TRACES_SAMPLER", "").lower()
    return None if name.endswith("always_off") else ParentBased(ALWAYS_ON)


def _resource(service_name: str) -> Resource:
    given = OTELResourceDetector().detect().attributes
    ours = {"service.name": service_name, "service.instance.id": str(uuid.uuid4())}
    return Resource.create({name: ours[name] for name in ours if name not in given})


def _limits(max_links: int) -> SpanLimits:
    if "OTEL_SPAN_LINK_COUNT_LIMIT" in os.environ:
        return SpanLimits()
    return SpanLimits(max_links=max_links)
