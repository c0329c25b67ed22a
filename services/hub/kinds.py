"""Lists the kinds of sources, and finds the source that a text names."""

from collections.abc import Callable

from services.hub.hub_source import HubSource
from services.hub.s3_source import S3Source
from services.hub.source import Source

FORMS = "org/name or org/name@revision on the hub, or s3://bucket/prefix"

_PARSERS: tuple[Callable[[str], Source | None], ...] = (S3Source.parse, HubSource.parse)


def source_in(text: str) -> Source | None:
    """Returns the source that a text names. Returns None if the text has the form of no kind of
    source.

    Raises:
        ValueError: the text has the form of a kind but is invalid. The message says why.
    """
    for parse in _PARSERS:
        source = parse(text)
        if source is not None:
            return source
    return None
