"""The adapters (LoRA) of a model as workers tell them: a trait for each, by its name.

A trait `adapter:NAME` has the digest of the adapter's files. So all stages of a pipeline have equal
adapters, and schedulers and frontends know from the traits of a pipeline which ones it has.
"""

import hashlib
import re
from collections.abc import Mapping

_PREFIX = "adapter:"

_ALL = "adapters"

N_DIGITS = 16
"""Number of hexadecimal digits of the digest of all adapters."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")


def check_name(name: str) -> None:
    """Raises ValueError if a text cannot be the name of an adapter."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name[:80]!r} is no name: letters, digits and ._:/@+- after a letter or digit, 128 "
            "characters at most"
        )


def adapter_traits(digests: Mapping[str, str]) -> dict[str, str]:
    """Returns the traits of a worker whose adapters have these digests, by their names: one for
    each adapter, and a digest of all of them. There are none without adapters."""
    if not digests:
        return {}
    together = hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()
    return {
        _ALL: together[:N_DIGITS],
        **{f"{_PREFIX}{name}": digest for name, digest in digests.items()},
    }


def is_adapter(trait: str) -> bool:
    """Returns whether the trait with a name tells an adapter."""
    return trait.startswith(_PREFIX)


def adapters_in(traits: Mapping[str, str]) -> dict[str, str]:
    """Returns the digest of each adapter that the traits of a worker tell, by the adapter's name,
    in the order of the names."""
    return {
        name.removeprefix(_PREFIX): digest
        for name, digest in sorted(traits.items())
        if is_adapter(name)
    }
