"""Orders for profiles of a stage's ranks. One profile is taken at a time. All profiles are written
to one directory."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from orcinus.v1 import worker_pb2

from services.common.errors import InvalidRequest, PermissionDenied, Unavailable
from services.worker.channel import MessageKind
from services.worker.controller.rank_process import RankLink

MAX_ITERATIONS = 100
"""Largest number of iterations in a profile. Each iteration takes some megabytes, and the rank
computes nothing while it writes the profile."""


class ProfileOrders:
    """Orders a profile from a rank, one at a time. The rank writes the profile to a directory. If
    no directory is set, all orders are refused."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._stage_index = 0
        self._ranks: Sequence[RankLink] = ()
        self._ordered: asyncio.Future[None] | None = None

    def attach(self, ranks: Sequence[RankLink], *, stage_index: int = 0) -> None:
        """Sets the ranks of the stage, in the order of their tp_rank. `stage_index` becomes part of
        the names of profiles."""
        self._ranks = ranks
        self._stage_index = stage_index

    async def take(self, request: worker_pb2.ProfileRequest) -> Path:
        """Orders a profile of a rank's next iterations, waits until the profile is written, and
        returns its file.

        Raises:
            PermissionDenied: no directory is set.
            InvalidRequest: the rank does not exist, or the number of iterations is out of range.
            Unavailable: another profile is being taken, or the profile could not be written.
        """
        if self._directory is None:
            raise PermissionDenied("no profiles are taken here: profile_dir is not set")
        if not 1 <= request.n_iterations <= MAX_ITERATIONS:
            raise InvalidRequest("n_iterations", f"must be from 1 to {MAX_ITERATIONS}")
        if request.tp_rank >= len(self._ranks):
            raise InvalidRequest("tp_rank", f"there are {len(self._ranks)} ranks")
        if self._ordered is not None:
            raise Unavailable("another profile is being taken")
        path = self._directory / self._name(request.tp_rank)
        rank = self._ranks[request.tp_rank]
        self._ordered = asyncio.get_running_loop().create_future()
        rank.send(MessageKind.PROFILE, f"{request.n_iterations} {path}".encode())
        try:
            await self._ordered
        except asyncio.CancelledError:
            rank.send(MessageKind.PROFILE, b"0 ")
            raise
        finally:
            self._ordered = None
        return path

    def on_message(self, kind: MessageKind, payload: bytes) -> None:
        """Handles a rank's message that a profile is written, or why it could not be written."""
        if self._ordered is None or self._ordered.done():
            return
        if kind is MessageKind.PROFILED:
            self._ordered.set_result(None)
        else:
            self._ordered.set_exception(Unavailable(payload.decode()))

    def _name(self, tp_rank: int) -> str:
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        return f"stage-{self._stage_index}-rank-{tp_rank}-{now}.json.gz"
