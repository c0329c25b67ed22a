"""OpenTelemetry's environment variables: whether they switch traces on, and which of them are
wrong.

OpenTelemetry's libraries read the variables while they are imported. A wrong value gives a
traceback, or a default is used silently. This module has the rules of the libraries. With it, a
service refuses a wrong value, in one line, before it imports the libraries. If traces are off,
nothing is checked. An empty variable counts as unset, as OpenTelemetry's specification has it.
"""

import math
import os
import re
import ssl
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from urllib.parse import unquote, urlsplit

from services.common.errors import shortened
from services.common.url_credentials import without_credentials

Check = Callable[[str], str]
"""A function that checks a value of a variable. Returns what the value must be, as text, or an
empty text if the value is right."""

GRPC, HTTP = "grpc", "http/protobuf"
PROPAGATORS = ("tracecontext", "baggage", "b3", "b3multi")
SAMPLERS = (
    *("always_on", "always_off", "traceidratio"),
    *("parentbased_always_on", "parentbased_always_off", "parentbased_traceidratio"),
)
COMPRESSIONS = ("none", "gzip", "deflate")
MAX_TIMEOUT_S = 600
"""Largest timeout of an export in seconds. OpenTelemetry's specification uses milliseconds, and its
Python libraries use seconds, so a larger number was probably meant as milliseconds."""

QUEUE, BATCH = "OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
QUEUE_SIZE, BATCH_SIZE = 2048, 512
"""Default sizes of the queue of spans and of a batch, in spans."""

_SAMPLER, _RATIO = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
_ALL, _TRACES = "OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"
_STATUS_CODES = (
    *("ok", "cancelled", "unknown", "invalid_argument", "deadline_exceeded", "not_found"),
    *("already_exists", "permission_denied", "unauthenticated", "resource_exhausted"),
    *("failed_precondition", "aborted", "unimplemented", "internal", "unavailable", "data_loss"),
    "out_of_range",
)
_HEADER = re.compile(r"\s*[A-Za-z0-9_.-]+\s*=([ !#-+\--:<-\[\]-~]*)")
_PRINTABLE = re.compile(r"[ -~]*")


def are_traces_wanted(environment: Mapping[str, str]) -> bool:
    """Returns whether the variables name an endpoint for traces and do not switch traces off."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return False
    return bool(otlp_value(environment, "ENDPOINT"))


def otlp_variable(environment: Mapping[str, str], name: str) -> str:
    """Returns the name of the variable that sets an option of OTLP. For the option `ENDPOINT`, this
    is `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` if that is set, otherwise
    `OTEL_EXPORTER_OTLP_ENDPOINT`."""
    return (_TRACES if environment.get(_TRACES + name) else _ALL) + name


def otlp_value(environment: Mapping[str, str], name: str) -> str:
    """Returns the value of an option of OTLP, such as `ENDPOINT`. The result is empty if neither
    variable of the option is set."""
    return environment.get(otlp_variable(environment, name), "")


def protocol(environment: Mapping[str, str]) -> str:
    """Returns the protocol by which spans are sent, `GRPC` or `HTTP`."""
    return otlp_value(environment, "PROTOCOL").lower() or GRPC


def trouble_with(environment: Mapping[str, str]) -> str:
    """Returns a text that names each wrong variable with its value; values that may be secret are
    left out. The text is empty if traces are off or all variables are right."""
    if not are_traces_wanted(environment):
        return ""
    troubles = [
        _said(name, needed, environment[name], is_secret=name.endswith("_HEADERS"))
        for name, check in CHECKS.items()
        if environment.get(name) and (needed := check(environment[name]))
    ]
    # Rules about several variables make sense only for values that are right alone.
    return "; ".join(troubles) or _trouble_together(environment)


def _trouble_together(environment: Mapping[str, str]) -> str:
    endpoint_name = otlp_variable(environment, "ENDPOINT")
    needed = _endpoint(environment[endpoint_name], protocol(environment))
    if needed:
        return _said(endpoint_name, needed, without_credentials(environment[endpoint_name]))
    ratio = environment.get(_RATIO)
    if ratio and environment.get(_SAMPLER, "").lower().endswith("traceidratio"):
        needed = _ratio(ratio)
        if needed:
            return _said(_RATIO, needed, ratio)
    queue = int(environment.get(QUEUE) or QUEUE_SIZE)
    batch = int(environment.get(BATCH) or BATCH_SIZE)
    if batch > queue:
        return f"{BATCH}: must be at most {QUEUE}, {queue} (it is {batch})"
    return _trouble_with_certificate(environment)


def _trouble_with_certificate(environment: Mapping[str, str]) -> str:
    """Returns a text that says what is wrong with the client certificate for the collector, or an
    empty text."""
    names = [otlp_variable(environment, name) for name in ("CLIENT_CERTIFICATE", "CLIENT_KEY")]
    certificate, key = (environment.get(name, "") for name in names)
    if not certificate and not key:
        return ""
    if not (certificate and key):
        return f"{names[0]} and {names[1]}: must be set together"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, password="")
    except OSError:
        return f"{names[0]}: {certificate!r} and the key {key!r} are no pair in PEM"
    return ""


def _said(name: str, needed: str, value: str, *, is_secret: bool = False) -> str:
    return f"{name}: {needed}" + ("" if is_secret else f" (it is {shortened(repr(value))})")


def _one_of(*values: str) -> Check:
    *most, last = values
    needed = f"must be {', '.join(most)} or {last}"
    return lambda value: "" if value.lower() in values else needed


def _all_of(*values: str) -> Check:
    """Returns a check for a list of names, separated by commas, each of which must be one of
    `values`."""
    needed = f"must be names among {', '.join(values)}, separated by commas"

    def check(value: str) -> str:
        return "" if {name.strip().lower() for name in value.split(",")} <= {*values} else needed

    return check


def _whole(smallest: int, *, or_else: str = "") -> Check:
    needed = f"must be a whole number from {smallest}" + (f", or {or_else}" if or_else else "")

    def check(value: str) -> str:
        text = value.strip().lower()
        if or_else and text == or_else:
            return ""
        is_right = re.fullmatch(r"[0-9]{1,15}", text) is not None and int(text) >= smallest
        return "" if is_right else needed

    return check


def _number(value: str) -> float:
    """Returns the number in a text. Returns NaN if the text is not a number."""
    try:
        return float(value)
    except ValueError:
        return math.nan


def _timeout(value: str) -> str:
    is_right = 0 < _number(value) <= MAX_TIMEOUT_S
    return "" if is_right else f"must be seconds, more than 0 and at most {MAX_TIMEOUT_S}"


def _ratio(value: str) -> str:
    return "" if 0 <= _number(value) <= 1 else "must be a ratio from 0 to 1"


def _endpoint(value: str, by: str) -> str:
    needed = "must be like http://HOST:PORT or https://HOST:PORT"
    if by == GRPC and "://" not in value:
        needed, value = f"{needed}, or HOST:PORT", f"//{value}"
    try:
        url = urlsplit(value)
        is_right = url.scheme in ("", "http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # of brackets or of the port
        return needed
    return "" if is_right and not (url.scheme == "" and by == HTTP) else needed


def _headers(value: str) -> str:
    for number, member in enumerate(value.split(","), start=1):
        found = _HEADER.fullmatch(member)
        if member.strip() and (found is None or not _PRINTABLE.fullmatch(unquote(found[1]))):
            return (
                f"must be NAME=VALUE in printable ASCII, separated by commas; no. {number} is not"
            )
    return ""


def _attributes(value: str) -> str:
    members = [member for member in value.split(",") if member.strip()]
    if all(member.partition("=")[0].strip() and "=" in member for member in members):
        return ""
    return "must be NAME=VALUE, separated by commas"


def _authorities(value: str) -> str:
    try:
        ssl.create_default_context(cafile=value)
    except ssl.SSLError:
        return "must be a file with certificates in PEM"
    except OSError as error:
        return f"must be a file that can be read: {error.strerror}"
    return ""


def _file(value: str) -> str:
    is_right = os.path.isfile(value) and os.access(value, os.R_OK)
    return "" if is_right else "must be a file that can be read"


def _installed(group: str, *others: str) -> Check:
    """Returns a check for names of OpenTelemetry components. A name must be registered in the
    entry-point group `group` by an installed package, or be one of `others`."""

    def check(value: str) -> str:
        names = {name.strip() for name in value.split(",") if name.strip()}
        return "" if names <= {*entry_points(group=group).names, *others} else "is not installed"

    return check


_IS_TRUE = _one_of("true", "false")
_LIMIT = _whole(0, or_else="unset")
_PROVIDER = _installed("opentelemetry_otlp_credential_provider")
_OTLP_CHECKS: Mapping[str, Check] = {
    "PROTOCOL": _one_of(GRPC, HTTP),
    "INSECURE": _IS_TRUE,
    "CERTIFICATE": _authorities,
    "CLIENT_CERTIFICATE": _file,
    "CLIENT_KEY": _file,
    "HEADERS": _headers,
    "COMPRESSION": _one_of(*COMPRESSIONS),
    "TIMEOUT": _timeout,
}
CHECKS: Mapping[str, Check] = {
    "OTEL_SDK_DISABLED": _IS_TRUE,
    "OTEL_TRACES_EXPORTER": _one_of("otlp", "none"),
    "OTEL_PROPAGATORS": _all_of(*PROPAGATORS, "none"),
    _SAMPLER: _one_of(*SAMPLERS),
    "OTEL_RESOURCE_ATTRIBUTES": _attributes,
    "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": _installed("opentelemetry_resource_detector", "*"),
    "OTEL_PYTHON_CONTEXT": _installed("opentelemetry_context"),
    "OTEL_BSP_SCHEDULE_DELAY": _whole(1),
    "OTEL_BSP_EXPORT_TIMEOUT": _whole(0),
    QUEUE: _whole(1),
    BATCH: _whole(1),
    "OTEL_ATTRIBUTE_COUNT_LIMIT": _LIMIT,
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": _LIMIT,
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT": _LIMIT,
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT": _LIMIT,
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": _LIMIT,
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": _LIMIT,
    "OTEL_SPAN_EVENT_COUNT_LIMIT": _LIMIT,
    "OTEL_SPAN_LINK_COUNT_LIMIT": _LIMIT,
    **{prefix + name: it for prefix in (_ALL, _TRACES) for name, it in _OTLP_CHECKS.items()},
    "OTEL_PYTHON_EXPORTER_OTLP_GRPC_RETRYABLE_ERROR_CODES": _all_of(*_STATUS_CODES),
    "OTEL_PYTHON_EXPORTER_OTLP_GRPC_CREDENTIAL_PROVIDER": _PROVIDER,
    "OTEL_PYTHON_EXPORTER_OTLP_GRPC_TRACES_CREDENTIAL_PROVIDER": _PROVIDER,
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER": _PROVIDER,
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER": _PROVIDER,
    "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED": _IS_TRUE,
}
"""The check of each variable that the libraries read for traces. Endpoints are checked by
`_trouble_together`, because their form depends on the protocol. `OTEL_SERVICE_NAME` may have any
value."""
