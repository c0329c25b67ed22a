"""Selects a sample of the cases of each test, for a run that has no time for all cases.

`SAMPLE=8` keeps at most eight cases of each parametrised test. Tests of whole systems are sampled
by folder, since most of them start processes for each case and take half a minute of processor
time: at most eight cases of each folder are kept. Cases are chosen by `SAMPLE_SEED`. So a run can
be repeated, and runs with different seeds try different cases.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping


def group_of(case: str, *, is_of_system: bool) -> str:
    """Returns the name of the group that a case belongs to: the test, or the test's folder if the
    test starts a whole system. A sample has a limited number of cases of each group.

    `case` is pytest's node ID, in which a test's name ends where its parameters begin.
    """
    if is_of_system:
        return case.partition("::")[0].rpartition("/")[0]
    return case.partition("[")[0]


def drawn_cases(groups: Mapping[str, str], size: int, seed: str) -> set[str]:
    """Returns the cases to run: at most `size` of each group, chosen pseudo-randomly by `seed`.
    `groups` has the group of each case."""
    cases_of_groups = defaultdict(list)
    for case, group in groups.items():
        cases_of_groups[group].append(case)

    def place(case: str) -> bytes:
        return hashlib.sha256(f"{seed} {case}".encode()).digest()

    return {
        case for of_group in cases_of_groups.values() for case in sorted(of_group, key=place)[:size]
    }
