"""The traits by which a worker reports the adapters (LoRA) of its model.

A trait is a name with a text. The trait `adapter:NAME` has the digest of the files of the adapter
NAME. All stages of a pipeline must have equal traits, and so have equal adapters. Schedulers and
frontends find out from the traits of a pipeline which adapters it has.
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
    """Returns the traits of a worker, by name, from the digest of each of its adapters, by the
    adapter's name. There is one trait for each adapter, and one with a digest of all adapters.
    Returns an empty dictionary if the worker has no adapters."""
    if not digests:
        return {}
    together = hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()
    return {
        _ALL: together[:N_DIGITS],
        **{f"{_PREFIX}{name}": digest for name, digest in digests.items()},
    }


def is_adapter(trait: str) -> bool:
    """Returns whether `trait`, the name of a trait, is the name of an adapter's trait."""
    return trait.startswith(_PREFIX)


def adapters_in(traits: Mapping[str, str]) -> dict[str, str]:
    """Returns the digest of each adapter that a worker has, by the adapter's name, in alphabetical
    order of the names. `traits` are the traits of the worker."""
    return {
        name.removeprefix(_PREFIX): digest
        for name, digest in sorted(traits.items())
        if is_adapter(name)
    }
