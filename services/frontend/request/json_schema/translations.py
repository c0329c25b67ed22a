"""Caches the translations of tools' schemas, because agents send the same tools with every turn.

Translating the schemas of 200 tools takes 70 ms, and looking their translations up takes 7 ms. The
most recently used translations are kept, up to `MAX_BYTES`. Several threads may translate at the
same time.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from services.frontend.request.json_schema.schema_part import Json
from services.frontend.request.json_schema.translation import Translation
from services.frontend.request.json_schema.unenforced import Unenforced

MAX_BYTES = 8 * 2**20
"""Largest size in bytes of all translations that are kept. The schemas of about 400 tools with 2 KB
each fit."""

BYTES_PER_CHARACTER = 8
"""Bytes of memory that a kept translation may take for each character of the parameters. The
parameters themselves are included. Most translations take half of that."""


class Translated(NamedTuple):
    """The translation of a schema: the schema that the grammar engine enforces, and the keywords
    that it does not enforce."""

    enforced: Json
    """The schema that the grammar engine enforces. It must not be changed."""
    reported: tuple[Unenforced, ...]
    """Keywords that are not enforced, in the order in which they were found."""


class Translations:
    """Caches the most recently used translations, keyed by the parameters of their tools."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._kept: OrderedDict[tuple[str, bool], Translated] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, schema: Mapping[str, Any], parameters: str, *, closes: bool) -> Translated:
        """Returns the translation of a schema, and keeps it for later calls. `parameters` is the
        JSON text of the schema; if it is empty, the translation is not kept. If `closes` is true,
        an object whose schema declares members may have no other members, unless the schema allows
        them explicitly.

        Raises:
            WrongSchema: the schema is wrong, or too large.
        """
        key = parameters, closes
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
        translation = Translation(dict(schema), closes=closes)
        translated = Translated(translation.enforced, tuple(translation.reported))
        if parameters:
            with self._lock:
                self._keep(key, translated)
        return translated

    def _keep(self, key: tuple[str, bool], translated: Translated) -> None:
        if key not in self._kept:
            self._n_bytes += _n_bytes(key)
        self._kept[key] = translated
        while self._n_bytes > self._max_bytes:
            dropped, _ = self._kept.popitem(last=False)
            self._n_bytes -= _n_bytes(dropped)


def _n_bytes(key: tuple[str, bool]) -> int:
    return BYTES_PER_CHARACTER * len(key[0])


TRANSLATIONS = Translations()
"""The cached translations of this process."""
