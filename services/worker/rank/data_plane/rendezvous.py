"""The meeting of an epoch's ranks in a store, and the transport that comes of it.

The store is a TCP server in the first rank of stage 0 and outlives epochs. All ranks announce
themselves there before any of them makes a group: groups are then only made of ranks that are
there, and a short timeout is enough for their connections.
"""

import socket
from datetime import timedelta
from functools import partial

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from services.worker.rank.data_plane.group_transport import GroupTransport
from services.worker.rank.data_plane.groups import make_group
from services.worker.rank.data_plane.transport import RankPlace, TransferError, Transport

JOIN_TIMEOUT = timedelta(seconds=30)
"""Time in which the ranks of an epoch must meet."""


def create_rendezvous(host: str, port: int) -> TCPStore:
    """Opens the store where all ranks meet, listening on `host` only; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
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
    """Builds the groups of an epoch when all its ranks are there.

    Raises:
        TransferError: the other ranks could not be reached.
    """
    host, _, port = rendezvous_address.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    try:
        store = PrefixStore(
            place.prefix,
            TCPStore(
                host, int(port), is_master=False, wait_for_workers=False, timeout=JOIN_TIMEOUT
            ),
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
