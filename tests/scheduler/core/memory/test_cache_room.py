"""The caches of all pipelines together are bounded."""

from services.scheduler.core.memory.blocks import Blocks
from services.scheduler.core.memory.cache_room import CacheRoom
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.request import Request, RequestId

N_TOKENS = 40
BLOCK_SIZE = 4


def use(manager: KVManager, first_token: int) -> None:
    """Runs a request, which enters ten blocks."""
    request = Request(RequestId("x"), [first_token] * N_TOKENS, 1, cache_scope=b"")
    reservation = manager.reserve(request)
    assert reservation is not None
    manager.allocate(reservation, N_TOKENS)
    request.n_scheduled = N_TOKENS
    manager.enter(request, reservation)
    manager.release(reservation)


def n_entries(blocks: Blocks) -> int:
    return blocks.cache.n_unused


def test_caches_share_their_room_as_pipelines_come_and_go() -> None:
    room = CacheRoom(max_blocks=16)
    one, two = (
        KVManager(n_blocks=100, block_size=BLOCK_SIZE, has_prefix_cache=True) for _ in range(2)
    )
    room.open("one", one.blocks)
    for first_token in (1, 2):
        use(one, first_token)
    assert n_entries(one.blocks) == 16, "alone, it has all of the room"
    room.open("two", two.blocks)
    assert n_entries(one.blocks) == 8
    for first_token in (1, 2):
        use(two, first_token)
    use(one, 3)
    assert (n_entries(one.blocks), n_entries(two.blocks)) == (8, 8)
    assert one.blocks.n_in_use == two.blocks.n_in_use == 0
    room.close("one")
    use(two, 3)
    assert n_entries(two.blocks) == 16


def test_blocks_in_use_are_evicted_only_when_they_are_unused() -> None:
    room = CacheRoom(max_blocks=16)
    manager, other = (
        KVManager(n_blocks=100, block_size=BLOCK_SIZE, has_prefix_cache=True) for _ in range(2)
    )
    room.open("one", manager.blocks)
    request = Request(RequestId("x"), [1] * N_TOKENS, 1, cache_scope=b"")
    reservation = manager.reserve(request)
    assert reservation is not None
    manager.allocate(reservation, N_TOKENS)
    request.n_scheduled = N_TOKENS
    manager.enter(request, reservation)
    room.open("two", other.blocks)
    assert all(block in manager.blocks.cache for block in reservation.block_ids)
    manager.release(reservation)
    use(manager, 2)
    assert n_entries(manager.blocks) == 8
