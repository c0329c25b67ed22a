"""Lets an epoch's ranks meet in a store, and makes the epoch's transport.

The store is a TCP server in the first rank of stage 0, and is kept from one epoch to the next. All
ranks announce themselves in the store before any rank makes a group. Groups are then made only of
ranks that are present, so that a short timeout suffices for their connections.
"""

from datetime import timedelta
from functools import partial

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from services.common.address import Address, listen, parse
from services.worker.rank.data_plane.group_transport import GroupTransport
from services.worker.rank.data_plane.groups import make_group
from services.worker.rank.data_plane.transport import RankPlace, TransferError, Transport

JOIN_TIMEOUT = timedelta(seconds=30)
"""Timeout for the ranks of an epoch to meet in the store."""


def create_rendezvous(host: str, port: int) -> TCPStore:
    """Opens the store in which all ranks of a pipeline meet, on the address `host`. Port 0 takes a
    free port."""
    (listener,) = listen(str(Address(host, port)))
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=JOIN_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def join(
    place: RankPlace,
    *,
    rendezvous_address: str,
    data_host: str,
    device: torch.device,
    timeout_s: float,
) -> Transport:
    """Waits for all ranks of an epoch, makes the epoch's groups and returns their transport.

    Raises:
        TransferError: the other ranks could not be reached.
    """
    host, port = parse(rendezvous_address)
    if (":" in host) != (":" in data_host):
        raise TransferError(
            f"data_host is {data_host} here and {host} on stage 0: both must be of IPv4 or of IPv6"
        )
    timeout = timedelta(seconds=timeout_s)
    try:
        store = PrefixStore(
            place.prefix,
            TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=JOIN_TIMEOUT),
        )
        _meet(store, place)
        connect = partial(make_group, device=device, data_host=data_host, timeout=timeout)
        pipeline = connect(store, place.world_rank, place.world_size)
        stage_store = PrefixStore(f"stage {place.stage_index}", store)
        stage = connect(stage_store, place.tp_rank, place.tp_size)
    except (RuntimeError, ValueError) as error:
        raise TransferError(f"no process group for epoch {place.epoch}: {error}") from error
    return GroupTransport(place, pipeline, stage, device=device, timeout=timeout)


def _meet(store: Store, place: RankPlace) -> None:
    store.set(f"here/{place.world_rank}", "")
    store.wait([f"here/{rank}" for rank in range(place.world_size)], JOIN_TIMEOUT)
