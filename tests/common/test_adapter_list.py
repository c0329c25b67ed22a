"""The list of loaded adapters: lists that got the same changes are equal, whatever came first."""

import random

from hypothesis import given
from hypothesis import strategies as st

from services.common.adapter_list import MAX_LOADED, MAX_UNLOADED, AdapterEntry, AdapterList
from services.common.adapter_list_proto import from_proto, to_proto

ENTRIES = st.builds(
    AdapterEntry,
    version=st.integers(1, 6),
    is_removed=st.booleans(),
    name=st.sampled_from("abc"),
    source=st.just("/a"),
    digest=st.sampled_from(["1", "2"]),
)


@given(st.lists(ENTRIES), st.randoms(use_true_random=False))
def test_lists_with_the_same_changes_are_equal(
    entries: list[AdapterEntry], source: random.Random
) -> None:
    first, second = AdapterList(), AdapterList()
    first.merge(entries)
    shuffled = list(entries)
    source.shuffle(shuffled)
    for entry in shuffled:
        second.merge([entry])
    assert first.entries == second.entries
    assert not first.merge(second.entries)


def test_a_new_leader_gets_a_load_and_an_unload_that_crossed() -> None:
    leader, behind, ahead = AdapterList(), AdapterList(), AdapterList()
    behind.merge([leader.put("law", "/a/law", "1")])
    ahead.merge(behind.entries)
    removed = leader.remove("law")
    assert removed is not None
    ahead.merge([removed])
    for order in ([behind, ahead], [ahead, behind]):
        following = AdapterList()
        for one in order:
            following.merge(one.entries)
        assert following.get("law") is None


def test_a_change_by_a_new_leader_is_newer_than_all_of_the_old_one() -> None:
    now = 1000.0
    old, new = AdapterList(now=lambda: now), AdapterList(now=lambda: now + 1)
    old.put("law", "/a", "1")
    known = old.entries
    for _ in range(5):
        old.remove("law")
        old.put("law", "/a", "1")
    new.merge(known)  # the new leader's first frontend has not seen the last changes
    new.remove("law")
    assert not [one for one in new.merge(old.entries) if one.name == "law"]
    assert new.get("law") is None


def test_a_list_is_bounded() -> None:
    found = AdapterList()
    for number in range(MAX_LOADED + 10):
        found.put(f"a{number}", "/a", str(number))
    assert found.is_full
    assert len(found.digests) == MAX_LOADED
    assert found.get("a0") is None
    for number in range(10, MAX_LOADED + 10):
        found.remove(f"a{number}")
    for number in range(MAX_UNLOADED):
        found.put(f"b{number}", "/a", "1")
        found.remove(f"b{number}")
    assert len(found.entries) == MAX_UNLOADED


def test_messages_keep_entries() -> None:
    found = AdapterList()
    found.put("law", "/a/law", "1" * 64)
    found.put("medicine", "/a/medicine", "2" * 64)
    found.remove("medicine")
    assert tuple(from_proto(to_proto(found.entries))) == found.entries
