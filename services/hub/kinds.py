"""Lists the kinds of sources of checkpoints, and finds the source that a text names."""

from services.hub.s3_source import S3Source
from services.hub.source import Source

FORMS = "org/name or org/name@revision on the hub, or s3://bucket/prefix"


def source_in(text: str) -> Source | None:
    """Returns the source of a checkpoint that a text names. Returns None if the text does not have
    the form of any kind of source.

    Raises:
        ValueError: the text has the form of a kind but is invalid. The message says why.
    """
    storage = S3Source.parse(text)
    if storage is not None:
        return storage
    # The hub's library takes longer to import than all that fetches from S3.
    from services.hub.hub_source import HubSource

    return HubSource.parse(text)
