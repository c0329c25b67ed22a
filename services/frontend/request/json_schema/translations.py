"""Keeps the translations of tools' schemas, since agents send the same tools with every turn.

Translating the schemas of 200 tools takes 70 ms, and finding them here 7 ms. The most recently used
translations are kept, up to a number of bytes. Several threads may translate at the same time.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from services.frontend.request.json_schema.schema_part import Json
from services.frontend.request.json_schema.translation import Translation
from services.frontend.request.json_schema.unenforced import Unenforced

MAX_BYTES = 8 * 2**20
"""Largest number of bytes of the translations that are kept: the schemas of about 400 tools with
2 KB each."""

BYTES_PER_CHARACTER = 8
"""Bytes that a translation takes for each character of the parameters, which are kept too. Most
take half of that."""


class Translated(NamedTuple):
    """A schema in the form that the grammar engine enforces, and what of it is left out."""

    enforced: Json
    """The schema that the grammar engine enforces; must not be changed."""
    reported: tuple[Unenforced, ...]
    """Keywords that are not enforced, in order."""


class Translations:
    """The most recently used translations, by the parameters of their tools."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._kept: OrderedDict[tuple[str, bool], Translated] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, schema: Mapping[str, Any], parameters: str, *, closes: bool) -> Translated:
        """Returns the translation of a schema, and keeps it for later calls. `parameters` are the
        JSON text of the schema, and with an empty text nothing is kept. `Translation` describes
        `closes`.

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
"""The translations of this process."""
