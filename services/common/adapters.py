"""Makes and reads the traits by which a worker reports the adapters (LoRA) of its model.

A trait is a name with a text. The trait `adapter:NAME` has the digest of the files of the adapter
NAME. All stages of a pipeline must have equal traits, and so have equal adapters. Schedulers and
frontends find out from the traits of a pipeline which adapters it has.
"""

import hashlib
import re
from collections.abc import Mapping

_PREFIX = "adapter:"

_ALL = "adapters"

_LOADING = "adapter_loading"

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


def adapter_traits(digests: Mapping[str, str], *, max_loaded: int = 0) -> dict[str, str]:
    """Returns the traits with which a worker reports its adapters: a mapping from names to texts.

    `digests` has the digest of each adapter, by the adapter's name. There is one trait for each
    adapter, and one with a digest of all adapters. `max_loaded` is the number of adapters that
    clients may have loaded at a time; if it is above 0, it is reported as a trait, too. The result
    is empty if the worker has no adapters and clients can load none.
    """
    if not digests and not max_loaded:
        return {}
    # A worker that loads adapters cannot fuse gated products, so its results are rounded otherwise.
    known: list[object] = [*sorted(digests.items()), *((_LOADING,) if max_loaded else ())]
    together = hashlib.sha256(repr(known).encode()).hexdigest()
    return {
        _ALL: together[:N_DIGITS],
        **({_LOADING: str(max_loaded)} if max_loaded else {}),
        **{f"{_PREFIX}{name}": digest for name, digest in digests.items()},
    }


def max_loaded_in(traits: Mapping[str, str]) -> int:
    """Returns the number of adapters that clients may have loaded at a time on a worker that
    reports `traits`. Returns 0 if clients can load none."""
    return int(traits.get(_LOADING, "0"))


def is_adapter(trait: str) -> bool:
    """Returns whether a trait with the name `trait` reports an adapter."""
    return trait.startswith(_PREFIX)


def adapters_in(traits: Mapping[str, str]) -> dict[str, str]:
    """Returns the digest of each adapter of a worker that reports `traits`, by the adapter's name,
    in alphabetical order of the names."""
    return {
        name.removeprefix(_PREFIX): digest
        for name, digest in sorted(traits.items())
        if is_adapter(name)
    }
