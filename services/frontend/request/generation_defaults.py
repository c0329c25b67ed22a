"""The checkpoint's own defaults, from its `generation_config.json`: the sampling options that the
authors of the model recommend. They are used where a client sets no value.

The defaults are applied to requests of all protocols before anything is checked, so that a resumed
stream continues with the same options. The file also names the tokens that end an answer; only the
workers read these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from services.common import bounded_file, errors
from services.common.sampling import OPTIONS, WholeNumbers
from services.frontend.request.generation_request import MAX_TOKENS, GenerationOptions

FILE = "generation_config.json"

MAX_FILE_BYTES = 4 << 20
"""Largest size of `generation_config.json` in bytes. Most such files have a few hundred bytes."""

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling options that may have a default in `generation_config.json`, under the same names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Default values of options that clients may leave out."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """Reads the defaults from `generation_config.json` in a checkpoint's directory. Without
        such a file there are no defaults.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not valid, or a value is outside its range. The message names
            the file and what is wrong.
        """
        path = directory / FILE
        if not path.is_file():
            return cls()
        config = bounded_file.read_json_object(path, max_bytes=MAX_FILE_BYTES)
        try:
            return cls._from_config(config)
        except errors.InvalidRequest as error:
            raise ValueError(f"{path}: {error.message}") from None

    @classmethod
    def _from_config(cls, config: Mapping[str, Any]) -> Self:
        given = {name: config[name] for name in SAMPLING if config.get(name) is not None}
        for name, value in given.items():
            allowed = OPTIONS[name].allowed
            _check_number(name, value, is_whole=isinstance(allowed, WholeNumbers))
            allowed.check(name, value)
        if config.get("do_sample") is False:
            given["temperature"] = 0.0
        max_tokens = config.get("max_new_tokens")
        if max_tokens is not None:
            _check_number("max_new_tokens", max_tokens, is_whole=True)
            MAX_TOKENS.check("max_new_tokens", max_tokens)
        return cls(sampling=given, max_tokens=max_tokens)

    def __str__(self) -> str:
        values = dict(self.sampling)
        if self.max_tokens is not None:
            values["max_tokens"] = self.max_tokens
        return ", ".join(f"{name} {value:g}" for name, value in values.items())

    def apply(self, options: GenerationOptions) -> GenerationOptions:
        """Returns the options, with the defaults in place of values that the client has left
        out."""
        used = {name: v for name, v in self.sampling.items() if name in options.defaulted}
        if not used and self.max_tokens is None:
            return options
        sampling = replace(options.sampling, **used)
        return replace(options, sampling=sampling, default_max_tokens=self.max_tokens)


def _check_number(name: str, value: object, *, is_whole: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
        kind = "a whole number" if is_whole else "a number"
        raise errors.InvalidRequest(name, f"must be {kind}")
