"""The target of a command: a running server at a URL, or a local system that is started for a
model."""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from services.cli.local_system import serving
from services.cli.model import KINDS, say
from services.cli.programs import options_for
from services.common.http_api import ApiError, HttpApi

URL = "http://localhost:8000"
ANSWER_LIMIT_S = 600.0
"""Seconds without a received byte from the server after which a call has failed."""


@dataclass(frozen=True, slots=True)
class Target:
    """The API to call, and the name of the model that it serves."""

    api: HttpApi
    model: str
    api_key: str | None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line options that choose a target to `parser`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"{KINDS}; it is served while this lasts, with further options of services.local",
    )
    parser.add_argument("--url", help=f"a system that serves already ({URL}, without a MODEL)")
    parser.add_argument(
        "--model", dest="name", metavar="NAME", help="name of the model, if several are served"
    )
    parser.add_argument("--key-env", metavar="NAME", help="variable that holds the API key")


def parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Parses a command line. Returns the options of the command, and the remaining options, which
    are options of `services.local`.

    The process ends with an error in three cases: there are remaining options without a MODEL; both
    a MODEL and a URL are given; or the variable that should hold the API key is not set.
    """
    options, rest = parser.parse_known_args(arguments)
    if rest and options.model is None:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.model is not None and options.url is not None:
        parser.error("a MODEL is served here, and --url says where one is served: not both")
    if options.key_env is not None and not os.environ.get(options.key_env):
        parser.error(f"--key-env: the variable {options.key_env} is not set")
    return options, rest


@contextmanager
def opened(options: argparse.Namespace, rest: Sequence[str]) -> Iterator[Target]:
    """Yields the target that the options choose.

    For a MODEL a local system is started, and is stopped at the end of the block.

    Raises:
        NoModel: there is no such model, or it cannot be fetched.
        DoesNotServe: the local system ended, or did not serve in time.
        ApiError: no server answers, or the key is wrong.
        ValueError: the URL is malformed.
    """
    api_key = None if options.key_env is None else os.environ[options.key_env]
    if options.model is None:
        yield _target(options.url or URL, api_key, options.name)
        return
    local_options = options_for([options.model, *rest], is_named=True)
    say(f"starting {options.model} …")
    with serving(local_options) as addresses:
        yield _target(addresses.url, api_key, options.name)


def _target(url: str, api_key: str | None, name: str | None) -> Target:
    api = HttpApi(url, api_key=api_key, timeout_s=ANSWER_LIMIT_S)
    models = api.get("/v1/models")
    try:
        names = [str(model["id"]) for model in models["data"]]
    except (KeyError, TypeError) as error:
        raise ApiError(f"{api.url} lists no models") from error
    if not names:
        raise ApiError(f"{api.url} lists no model")
    if name is not None and name not in names:
        raise ApiError(f"{api.url} has no model {name}; it has {', '.join(names)}")
    return Target(api, name or names[0], api_key)
