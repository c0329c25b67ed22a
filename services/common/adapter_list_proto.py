"""Conversions between the entries of an adapter list and the messages of scheduler.proto."""

from collections.abc import Iterable, Iterator

from orcinus.v1 import scheduler_pb2

from services.common.adapter_list import AdapterEntry


def from_proto(message: scheduler_pb2.LoadedAdapters) -> Iterator[AdapterEntry]:
    """Yields the entries of an adapter list that a message describes."""
    for one in message.adapters:
        yield AdapterEntry(one.version, one.is_removed, one.name, one.source, one.digest)


def to_proto(entries: Iterable[AdapterEntry]) -> scheduler_pb2.LoadedAdapters:
    """Returns the message that describes `entries` of an adapter list."""
    return scheduler_pb2.LoadedAdapters(
        adapters=[
            scheduler_pb2.LoadedAdapter(
                name=one.name,
                source=one.source,
                digest=one.digest,
                version=one.version,
                is_removed=one.is_removed,
            )
            for one in entries
        ]
    )
