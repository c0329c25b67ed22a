"""The list of loaded adapters: lists that got the same changes are equal, whatever came first."""

import random

import pytest
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


class CountedVersion(int):
    """A version that counts how often it is compared."""

    n_compared = 0

    def __lt__(self, other: int) -> bool:
        CountedVersion.n_compared += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        CountedVersion.n_compared += 1
        return int(self) > int(other)

    def __eq__(self, other: object) -> bool:
        CountedVersion.n_compared += 1
        return int.__eq__(self, other)

    __hash__ = int.__hash__


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
def test_a_change_of_a_long_list_looks_at_few_entries(at_once: bool) -> None:
    n_entries = MAX_LOADED + MAX_UNLOADED
    entries = [
        AdapterEntry(CountedVersion(number + 1), number % 2 == 0, f"a{number}", "/a", "1")
        for number in range(n_entries)
    ]
    random.Random(1).shuffle(entries)
    found = AdapterList()
    CountedVersion.n_compared = 0
    for some in [entries] if at_once else [[one] for one in entries]:
        assert found.merge(some) == some
    assert CountedVersion.n_compared < 64 * n_entries
    assert len(found.entries) == n_entries


class CountedDigest(str):
    """A digest that counts how often it is compared."""

    n_compared = 0

    def __eq__(self, other: object) -> bool:
        CountedDigest.n_compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_an_adapter_is_found_by_its_digest_without_a_search() -> None:
    found = AdapterList()
    for number in range(MAX_LOADED):
        found.put(f"a{number}", "/a", str(number))
    CountedDigest.n_compared = 0
    entry = found.source_of(CountedDigest(MAX_LOADED - 1))
    assert entry is not None
    assert entry.name == f"a{MAX_LOADED - 1}"
    assert CountedDigest.n_compared < 10


def test_an_adapter_is_found_by_its_digest_as_long_as_a_name_has_it() -> None:
    found = AdapterList()
    first, second = found.put("a", "/a", "1"), found.put("b", "/b", "1")
    assert found.source_of("1") == first
    found.put("a", "/a", "2")
    assert found.source_of("1") == second
    found.remove("b")
    assert found.source_of("1") is None


def test_entries_that_a_full_list_forgets_at_once_are_no_change() -> None:
    found = AdapterList()
    for number in range(MAX_LOADED):
        found.put(f"a{number}", "/a", str(number))
    assert not found.merge([AdapterEntry(1, False, "old", "/a", "1")])
    assert found.get("old") is None


def test_messages_keep_entries() -> None:
    found = AdapterList()
    found.put("law", "/a/law", "1" * 64)
    found.put("medicine", "/a/medicine", "2" * 64)
    found.remove("medicine")
    assert tuple(from_proto(to_proto(found.entries))) == found.entries
