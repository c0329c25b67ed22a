"""The K/V manager: accounts for who may store how much, and where (Orca, section 4.2).

A K/V slot holds one token's keys and values; a block is `block_size` slots. Memory is decided
here and only here: block ids are the same on every stage, ranks only store. A request reserves,
once, all the slots it can need in its life, so that no admitted request ever waits for memory
(the paper's guard against deadlock); a reservation is a count, and a block gets an owner only
when a token needs it.

A reservation also holds a row of the ranks' request tables, since it begins and ends with it.
"""

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Reservation:
    """The row and the blocks that one request holds; never more blocks than were reserved."""

    row: int
    n_reserved_blocks: int
    block_ids: list[int] = field(default_factory=list)


class KVManager:
    """The accounts of all K/V memory: sum(reserved) <= n_blocks, and every block is free or has one
    owner."""

    def __init__(self, *, n_blocks: int, block_size: int) -> None:
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"no K/V memory: {n_blocks} blocks of {block_size} slots")
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.n_reserved_blocks = 0
        self._free_block_ids = array("I", range(n_blocks - 1, -1, -1))
        self._free_rows: list[int] = []
        self._n_rows = 0

    @property
    def n_slots(self) -> int:
        return self.n_blocks * self.block_size

    @property
    def n_reserved_slots(self) -> int:
        return self.n_reserved_blocks * self.block_size

    @property
    def n_allocated_slots(self) -> int:
        return (self.n_blocks - len(self._free_block_ids)) * self.block_size

    def fits_ever(self, max_sequence_len: int) -> bool:
        """Whether a request of `max_sequence_len` slots could run on an empty machine."""
        return self._blocks_for(max_sequence_len) <= self.n_blocks

    def reserve(self, max_sequence_len: int) -> Reservation | None:
        """Reserves slots for the life of a request, or returns None if there are not enough."""
        n_blocks = self._blocks_for(max_sequence_len)
        if self.n_reserved_blocks + n_blocks > self.n_blocks:
            return None
        self.n_reserved_blocks += n_blocks
        return Reservation(row=self._take_row(), n_reserved_blocks=n_blocks)

    def allocate(self, reservation: Reservation, n_tokens: int) -> list[int]:
        """Gives the reservation the blocks it lacks to store `n_tokens` tokens, and returns their
        ids."""
        n_new = self._blocks_for(n_tokens) - len(reservation.block_ids)
        if n_new <= 0:
            return []
        if len(reservation.block_ids) + n_new > reservation.n_reserved_blocks:
            raise ValueError(f"{n_tokens} tokens exceed a reservation of {reservation}")
        new = [self._free_block_ids.pop() for _ in range(n_new)]
        reservation.block_ids += new
        return new

    def release(self, reservation: Reservation) -> None:
        """Takes back the blocks, the row and the reservation of a request."""
        self.n_reserved_blocks -= reservation.n_reserved_blocks
        self._free_block_ids.extend(reversed(reservation.block_ids))
        self._free_rows.append(reservation.row)
        reservation.block_ids = []
        reservation.n_reserved_blocks = 0

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_size)

    def _take_row(self) -> int:
        if self._free_rows:
            return self._free_rows.pop()
        self._n_rows += 1
        return self._n_rows - 1
