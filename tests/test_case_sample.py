"""A sample of the cases of each test."""

from collections.abc import Iterable

from tests.case_sample import drawn_cases, group_of

LONE = "tests/test_a.py::test_lone"
MANY = [f"tests/test_a.py::TestB::test_many[{number}-[x]]" for number in range(50)]
FEW = [f"tests/test_a.py::test_few[{number}]" for number in range(3)]


def grouped(cases: Iterable[str], *, is_of_system: bool = False) -> dict[str, str]:
    return {case: group_of(case, is_of_system=is_of_system) for case in cases}


def test_each_test_keeps_as_many_cases_as_there_is_time_for() -> None:
    drawn = drawn_cases(grouped([LONE, *MANY, *FEW]), 4, "seed")
    assert LONE in drawn
    assert drawn.issuperset(FEW)
    assert len(drawn.intersection(MANY)) == 4
    assert len(drawn) == 8


def test_each_folder_of_tests_of_whole_systems_keeps_as_many_cases() -> None:
    elsewhere = "tests/b/test_a.py::test_lone"
    here = [LONE, *MANY, "tests/test_b.py::test_lone"]
    systems = grouped([*here, elsewhere], is_of_system=True)
    drawn = drawn_cases({**systems, **grouped(FEW)}, 4, "seed")
    assert elsewhere in drawn
    assert drawn.issuperset(FEW)
    assert len(drawn.intersection(here)) == 4


def test_a_seed_draws_the_same_cases_in_any_order_and_others_draw_others() -> None:
    assert drawn_cases(grouped(MANY), 4, "seed") == drawn_cases(grouped(MANY[::-1]), 4, "seed")
    in_turn = [drawn_cases(grouped(MANY), 4, str(seed)) for seed in range(100)]
    assert set().union(*in_turn) == set(MANY)
