"""Waiting calls: which is next and which is refused, against a slow count of everything."""

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.grpc.waiting_calls import FEW, WaitingCalls

CLIENTS = ("few", "other", "many")


def test_newest_first_and_oldest_refused() -> None:
    waiting: WaitingCalls[int] = WaitingCalls()
    for call in range(4):
        waiting.add("client", call)
    waiting.discard("client", 2)
    assert (waiting.take_next(), waiting.take_refused(), waiting.take_next()) == (3, 0, 1)
    assert len(waiting) == 0


def test_equal_clients_take_turns() -> None:
    waiting: WaitingCalls[str] = WaitingCalls()
    for client in "abc":
        for place in range(2):
            waiting.add(client, f"{client}{place}")
    assert [waiting.take_next() for _ in range(6)] == ["c1", "b1", "a1", "c0", "b0", "a0"]


@given(st.lists(st.sampled_from((*CLIENTS, "next", "refused"))))
def test_a_client_with_few_calls_comes_before_one_with_many(orders: list[str]) -> None:
    waiting: WaitingCalls[tuple[str, int]] = WaitingCalls()
    counts = dict.fromkeys(CLIENTS, 0)
    for number, order in enumerate(orders):
        if order in CLIENTS:
            for place in range(2 * FEW if order == "many" else 1):
                waiting.add(order, (order, number * 2 * FEW + place))
                counts[order] += 1
        elif len(waiting):
            call = waiting.take_next() if order == "next" else waiting.take_refused()
            client = call[0]
            present = [count for count in counts.values() if count]
            if order == "next":
                assert counts[client] < FEW or min(present) >= FEW
            else:
                assert counts[client] >= FEW or max(present) < FEW
            counts[client] -= 1
        assert len(waiting) == sum(counts.values())
