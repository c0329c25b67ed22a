"""The base of every service's settings: frozen, strict, read from `ORCINUS_*` variables or the
command line.

pydantic-settings ignores a misspelt environment variable even with `extra="forbid"`. Here such a
variable is an error, because a setting that is silently ignored is worse than a failed start. (In
Kubernetes a Service named `orcinus-…` puts variables of that prefix into every pod, unless the pod
says `enableServiceLinks: false`.)
"""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, StringConstraints, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    NoDecode,
    SettingsConfigDict,
    SettingsError,
)

from services.common import address as addresses
from services.common import otel_variables
from services.common.cgroups import CGROUPS
from services.common.ending import ready_fd_of, refuse
from services.common.errors import shortened
from services.common.memory_limit import memory_limit, trouble_of
from services.common.telemetry import LogFormat

PREFIX = "ORCINUS_"


def _names_in(value: object) -> object:
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def _as_written(address: str) -> str:
    return str(addresses.parse(address))


HostPort = Annotated[str, AfterValidator(_as_written)]
"""Type of a setting that is an address `host:port`, as `address.py` reads it. For a server, port 0
is any free port."""

_GRPC_TARGET = re.compile(r"(dns|ipv4|ipv6):\S+")


def _target(text: str) -> str:
    return text if _GRPC_TARGET.fullmatch(text) else _as_written(text)


Target = Annotated[str, AfterValidator(_target)]
"""Type of a setting that is an address to connect to, `host:port`, or several addresses in gRPC's
notation: `ipv4:10.0.0.1:50052,10.0.0.2:50052`."""

Host = Annotated[str, AfterValidator(addresses.parse_host)]
"""Type of a setting that is an IP address or a name. An IPv6 address may be in brackets, which are
removed."""

ModelName = Annotated[str, StringConstraints(pattern=r"^[!-+\--~]{1,128}$")]

ModelNames = Annotated[tuple[ModelName, ...], NoDecode, BeforeValidator(_names_in)]
"""Type of a setting with the names by which clients know a model, separated by commas. The
command-line option may also be given several times."""


class ServiceSettings(BaseSettings):
    """Settings of one service. Subclasses add fields; the description of each field has its unit
    and its reason."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,  # a Kubernetes fieldRef to a label that is not there gives ""
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def load(cls, program: str, arguments: Sequence[str], *, cgroups: Path = CGROUPS) -> Self:
        """Reads the settings from the environment and the command line. The command line takes
        precedence.

        Raises:
            SystemExit: a value is wrong or a name unknown, a variable of OpenTelemetry is wrong, or
                the service may need more memory than its cgroup allows. The message says which.
        """
        unknown = cls._unknown_variables(os.environ)
        ready_fd = ready_fd_of(arguments)
        if unknown:
            refuse(f"unknown environment variable: {', '.join(unknown)}", ready_fd=ready_fd)
        try:
            source: CliSettingsSource[Any] = CliSettingsSource(
                cls, cli_prog_name=f"python -m services.{program}", cli_exit_on_error=False
            )
            settings = CliApp.run(cls, cli_args=list(arguments), cli_settings_source=source)
        except ValidationError as error:
            refuse(_explain(error), ready_fd=ready_fd)
        except SettingsError as error:
            reason = str(error).removeprefix("error parsing CLI: ")
            refuse(f"{reason}; --help lists all settings", ready_fd=ready_fd)
        trouble = trouble_of(settings.memory_parts(), memory_limit(cgroups))
        trouble = trouble or otel_variables.trouble_with(os.environ)
        if trouble:
            refuse(trouble, ready_fd=ready_fd)
        return settings

    def memory_parts(self) -> Mapping[str, int]:
        """Returns, for each setting that determines a part of the service's memory, the largest
        size of this part in bytes.

        The result is empty if the memory is not known at the start (`memory_limit.py`).
        """
        return {}

    @classmethod
    def _unknown_variables(cls, environment: Any) -> list[str]:
        known = {f"{PREFIX}{name}".upper() for name in cls.model_fields}
        return sorted(
            name for name in environment if name.startswith(PREFIX) and name.upper() not in known
        )


class ServerSettings(ServiceSettings):
    """Settings of every service that listens."""

    health_address: HostPort | None = None
    """Address, host:port, that answers gRPC health checks without TLS, for probes that cannot do
    TLS. The service's own port answers health checks too. When this setting is not set, only the
    service's own port answers them."""

    metrics_address: HostPort | None = None
    """Address, host:port, that answers `GET /metrics` for Prometheus and `GET /health/NAME` for
    probes that cannot use gRPC, always without TLS. When not set, the service answers neither."""

    tls_dir: Path | None = None
    """Directory with `tls.crt`, `tls.key` and `ca.crt` for calls between services, laid out as a
    mounted Secret of the kind `kubernetes.io/tls`. Files are read again when they change. When not
    set, nothing between services is encrypted or authenticated."""

    ready_fd: int | None = None
    """File descriptor of the pipe to which this process writes its progress and its addresses for a
    local launcher. The process ends with its launcher. Only `services.local` sets it."""

    turn_fd: int | None = None
    """File descriptor of the pipe on which a spare process waits, after its start, until a local
    launcher lets it serve. Only `services.local` sets it."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe messages that are logged."""

    log_format: LogFormat = "text"
    """Form of log messages: `text` for people, `json` for machines. JSON messages carry the trace
    and the span that they belong to."""


def _explain(error: ValidationError) -> str:
    """Returns a text that says for each wrong setting what is wrong with its value. If a setting
    may have several types, the text says for each type why the value does not fit."""
    reasons: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    for item in error.errors():
        name = _name(item["loc"])
        reasons.setdefault(name, []).append(_reason(item))
        if name and item["type"] != "missing":
            values[name] = f" (it is {shortened(repr(item['input']))})"
    return "; ".join(
        f"{name}{': ' if name else ''}{', or: '.join(why)}{values.get(name, '')}"
        for name, why in reasons.items()
    )


def _reason(item: ErrorDetails) -> str:
    return (
        "must be given" if item["type"] == "missing" else item["msg"].removeprefix("Value error, ")
    )


def _name(place: tuple[int | str, ...]) -> str:
    """Returns the path of a setting as text. Names of types that pydantic adds to the path are left
    out. If a setting may have a value for each model, the indices that pydantic adds for one value
    are left out, too."""
    if len(place) == 3 and all(isinstance(part, int) for part in place[1:]):
        place = place[:1]
    names = takewhile(lambda part: "[" not in str(part), place)
    return ".".join(map(str, names))
