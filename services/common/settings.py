"""The base of every service's settings: frozen, strict, from `ORCINUS_*` variables or the command
line.

pydantic-settings ignores a misspelt environment variable even with `extra="forbid"`; here it is
an error, since a setting that is silently not applied is worse than a start that fails. (In
Kubernetes a Service named `orcinus-…` puts variables of that prefix into every pod, unless the
pod says `enableServiceLinks: false`.)
"""

import os
from collections.abc import Sequence
from typing import Any, Self

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

PREFIX = "ORCINUS_"


class ServiceSettings(BaseSettings):
    """Settings of one service; subclasses add fields, each with unit and reason in its
    description."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def load(cls, program: str, arguments: Sequence[str]) -> Self:
        """Reads environment and command line; the latter wins.

        Raises:
            SystemExit: a value is wrong or a name unknown; the message says which.
        """
        unknown = cls._unknown_variables(os.environ)
        if unknown:
            raise SystemExit(f"{program}: unknown environment variable: {', '.join(unknown)}")
        try:
            return CliApp.run(cls, cli_args=list(arguments))
        except ValidationError as error:
            raise SystemExit(f"{program}: {_explain(error)}") from None

    @classmethod
    def _unknown_variables(cls, environment: Any) -> list[str]:
        known = {f"{PREFIX}{name}".upper() for name in cls.model_fields}
        return sorted(
            name for name in environment if name.startswith(PREFIX) and name.upper() not in known
        )


def _explain(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()
    )
