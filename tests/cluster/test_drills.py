"""The table of the drills; the drills themselves need a cluster."""

from tests.cluster.drills import PAGE, TABLE, Waits, median, table


def test_the_table_has_a_place_on_the_page() -> None:
    found = table([("frontend", Waits(1, 2), Waits(3, 4))])
    assert found.endswith("| frontend | 1.0 s | 2.0 s | 3.0 s | 4.0 s |\n")
    text, n_places = TABLE.subn(found, PAGE.read_text(encoding="utf-8"))
    assert n_places == 1
    assert found in text


def test_each_wait_has_a_median_of_its_own() -> None:
    assert median([Waits(1, 6), Waits(9, 5), Waits(2, 7)]) == Waits(2, 6)
