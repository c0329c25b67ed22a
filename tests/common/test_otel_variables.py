"""OpenTelemetry's variables: wrong ones are named in one line, and only where traces are wanted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.common import otel_variables, tracing
from services.common.client_trace import FORMS
from services.common.otel_variables import CHECKS, trouble_with
from services.common.settings import ServiceSettings
from tests.certificates import Authority
from tests.limits import HANG_S

ON = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
OTLP, TRACES = "OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"
HTTP = {OTLP + "PROTOCOL": "http/protobuf"}
WRONG = {
    "OTEL_PROPAGATORS": "jaeger",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "abc",
    OTLP + "TIMEOUT": "10s",
}
"""Variables with which the libraries cannot be imported, or cannot start."""


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("OTEL_SDK_DISABLED", "yes", "true or false"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "otlp or none"),
        ("OTEL_TRACES_EXPORTER", "otlp,console", "otlp or none"),
        ("OTEL_PROPAGATORS", "tracecontext,xray", "tracecontext, baggage, b3, b3multi, none"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote", "parentbased_traceidratio"),
        ("OTEL_TRACES_SAMPLER", "always_on\n", "parentbased_traceidratio"),
        (OTLP + "TIMEOUT", "10s", "seconds, more than 0 and at most 600"),
        (OTLP + "TIMEOUT", "10000", "at most 600"),
        (TRACES + "TIMEOUT", "0", "more than 0"),
        (TRACES + "TIMEOUT", "inf", "at most 600"),
        (OTLP + "TIMEOUT", "nan", "at most 600"),
        (OTLP + "COMPRESSION", "zstd", "none, gzip or deflate"),
        (TRACES + "COMPRESSION", "zstd", "none, gzip or deflate"),
        (OTLP + "PROTOCOL", "http/json", "grpc or http/protobuf"),
        (TRACES + "PROTOCOL", "thrift", "grpc or http/protobuf"),
        (OTLP + "INSECURE", "1", "true or false"),
        (OTLP + "ENDPOINT", "http://[::1", "http://HOST:PORT"),
        (OTLP + "ENDPOINT", "http://collector:port", "http://HOST:PORT"),
        (TRACES + "ENDPOINT", "tcp://collector:4317", "http://HOST:PORT"),
        (OTLP + "CERTIFICATE", "/nowhere/ca.crt", "No such file"),
        (OTLP + "CERTIFICATE", __file__, "certificates in PEM"),
        (OTLP + "CLIENT_KEY", "/nowhere/tls.key", "a file that can be read"),
        (OTLP + "CLIENT_CERTIFICATE", __file__, "must be set together"),
        (TRACES + "CLIENT_CERTIFICATE", __file__, "must be set together"),
        (TRACES + "CLIENT_KEY", __file__, "must be set together"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0", "a whole number from 1"),
        ("OTEL_BSP_EXPORT_TIMEOUT", "5s", "a whole number from 0"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many", "a whole number from 1"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "100", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE: must be at most"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "-5", "a whole number from 1"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4096", "at most OTEL_BSP_MAX_QUEUE_SIZE, 2048"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "abc", "a whole number from 0, or unset"),
        ("OTEL_SPAN_EVENT_COUNT_LIMIT", "12.5", "a whole number from 0"),
        ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "-1", "a whole number from 0"),
        ("OTEL_RESOURCE_ATTRIBUTES", "team", "NAME=VALUE"),
        ("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS", "moon", "is not installed"),
        ("OTEL_PYTHON_CONTEXT", "moon", "is not installed"),
        ("OTEL_PYTHON_EXPORTER_OTLP_GRPC_RETRYABLE_ERROR_CODES", "teapot", "unavailable"),
        ("OTEL_PYTHON_EXPORTER_OTLP_GRPC_CREDENTIAL_PROVIDER", "gcp", "is not installed"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(name: str, value: str, needed: str) -> None:
    trouble = trouble_with(ON | {name: value})
    assert name in trouble
    assert needed in trouble
    assert value in trouble or repr(value) in trouble or "together" in trouble
    assert "\n" not in trouble


def test_all_wrong_variables_are_named() -> None:
    trouble = trouble_with(ON | WRONG)
    assert all(f"{name}: must be" in trouble for name in WRONG)


def test_headers_are_secrets() -> None:
    trouble = trouble_with(ON | {OTLP + "HEADERS": "x-tenant=1,Bearer hidden"})
    assert trouble.startswith(f"{OTLP}HEADERS: must be NAME=VALUE")
    assert "no. 2" in trouble
    assert "hidden" not in trouble
    assert trouble_with(ON | {TRACES + "HEADERS": "x-key=a%0Ab"})


@pytest.mark.parametrize("prefix", [OTLP, TRACES])
@pytest.mark.thorough
def test_credentials_in_an_endpoint_are_secrets(prefix: str, tmp_path: Path) -> None:
    variables = {prefix + "ENDPOINT": "tcp://user:hid/den@collector:4317"}
    done = run("-m", "services.local", f"--model={tmp_path}", **variables)
    assert done.stderr == (
        f"error: {prefix}ENDPOINT: must be like http://HOST:PORT or https://HOST:PORT "
        "(it is 'tcp://collector:4317')\n"
    )


@pytest.mark.parametrize(
    ("value", "is_right"), [("1.5", False), ("half", False), ("0.05", True), ("", True)]
)
def test_a_ratio_counts_for_samplers_that_have_one(value: str, is_right: bool) -> None:
    variables = ON | {"OTEL_TRACES_SAMPLER_ARG": value}
    ratio = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}
    assert bool(trouble_with(variables | ratio)) is not is_right
    assert not trouble_with(variables | {"OTEL_TRACES_SAMPLER": "always_on"})


@pytest.mark.parametrize(
    "variables",
    [
        {name: "" for name in CHECKS},
        {"OTEL_PROPAGATORS": "b3, tracecontext,baggage,b3multi", "OTEL_SDK_DISABLED": "false"},
        {"OTEL_PROPAGATORS": "none", "OTEL_TRACES_SAMPLER": "ALWAYS_ON"},
        {OTLP + "TIMEOUT": "2.5", TRACES + "TIMEOUT": "600", OTLP + "COMPRESSION": "none"},
        {OTLP + "ENDPOINT": "collector:4317", OTLP + "INSECURE": "true"},
        {OTLP + "ENDPOINT": "", TRACES + "ENDPOINT": "https://[::1]:4317"},
        HTTP | {OTLP + "ENDPOINT": "https://collector/otlp", OTLP + "COMPRESSION": "deflate"},
        {OTLP + "HEADERS": "Authorization=Bearer a.b-c=,x-tenant=%20a,"},
        {"OTEL_BSP_MAX_QUEUE_SIZE": "100", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "100"},
        {"OTEL_SPAN_LINK_COUNT_LIMIT": "unset", "OTEL_ATTRIBUTE_COUNT_LIMIT": "0"},
        {"OTEL_RESOURCE_ATTRIBUTES": "service.version=,a=b=c,", "OTEL_SERVICE_NAME": "x, y"},
        {"OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": "process,otel"},
        {"OTEL_PYTHON_EXPORTER_OTLP_GRPC_RETRYABLE_ERROR_CODES": "UNAVAILABLE, aborted"},
    ],
)
def test_right_variables_are_accepted(variables: dict[str, str]) -> None:
    assert trouble_with(ON | variables) == ""


def test_over_http_an_endpoint_needs_a_scheme() -> None:
    assert "http://HOST" in trouble_with(HTTP | {OTLP + "ENDPOINT": "collector:4318"})


def test_files_of_a_certificate_are_tried(tmp_path: Path) -> None:
    authority = Authority()
    authority.mount(tmp_path / "ours", "localhost")
    authority.mount(tmp_path / "other", "localhost")
    files = {
        OTLP + "CERTIFICATE": str(tmp_path / "ours" / "ca.crt"),
        OTLP + "CLIENT_CERTIFICATE": str(tmp_path / "ours" / "tls.crt"),
        OTLP + "CLIENT_KEY": str(tmp_path / "ours" / "tls.key"),
    }
    assert trouble_with(ON | files) == ""
    other = {OTLP + "CLIENT_KEY": str(tmp_path / "other" / "tls.key")}
    assert "are no pair in PEM" in trouble_with(ON | files | other)
    traces = {TRACES + "CLIENT_CERTIFICATE": str(tmp_path / "other" / "tls.crt")}
    assert trouble_with(ON | files | traces).startswith(f"{TRACES}CLIENT_CERTIFICATE: ")


@pytest.mark.parametrize(
    "off",
    [
        {"OTEL_SDK_DISABLED": " TRUE"},
        {"OTEL_TRACES_EXPORTER": "none"},
        {OTLP + "ENDPOINT": ""},
    ],
    ids=["disabled", "no exporter", "no endpoint"],
)
def test_where_traces_are_off_nothing_is_wrong(off: dict[str, str]) -> None:
    assert trouble_with(ON | WRONG | off) == ""


def test_settings_refuse_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (ON | {OTLP + "COMPRESSION": "zstd"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as raised:
        ServiceSettings.load("test", [])
    line = f"error: {OTLP}COMPRESSION: must be none, gzip or deflate (it is 'zstd')"
    assert raised.value.code == line


def run(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_a_service_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    done = run("-m", "services.local", f"--model={tmp_path}", **ON, **WRONG)
    assert done.returncode == 1
    assert done.stderr.startswith("error: OTEL_PROPAGATORS: must be")
    assert done.stderr.count("\n") == 1


@pytest.mark.thorough
def test_where_traces_are_off_nothing_is_loaded() -> None:
    program = """
import sys
import services.frontend.__main__, services.scheduler.__main__, services.worker.__main__
from services.common import tracing
assert not tracing.start("test").is_on
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exp"))])
"""
    done = run("-c", program, **ON, **WRONG, OTEL_SDK_DISABLED="true")
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("by", [{}, HTTP], ids=["grpc", "http"])
def test_the_libraries_read_no_variable_that_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, by: dict[str, str]
) -> None:
    read = set()
    get = os._Environ.__getitem__

    def spy(environment: "os._Environ[str]", name: str) -> str:
        read.add(name)
        return get(environment, name)

    for name, value in (ON | by).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os._Environ, "__getitem__", spy)
    with tracing.started("test") as traces:
        traces.tracer.start_span("x")
    theirs = {name for name in read if name.startswith("OTEL_")}
    elsewhere = {"ENDPOINT", "TRACES_ENDPOINT"}  # in `_trouble_together`
    unchecked = theirs - {*CHECKS} - {OTLP + name for name in elsewhere}
    assert unchecked <= {"OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER_ARG"}
    assert otel_variables.QUEUE in theirs


def test_every_propagator_has_its_form() -> None:
    assert set(otel_variables.PROPAGATORS) == set(FORMS)
