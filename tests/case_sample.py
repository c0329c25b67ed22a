"""A sample of the cases of each test, for a run that has no time for all of them.

`SAMPLE=8` keeps at most eight cases of each parametrised test. They are drawn by `SAMPLE_SEED`, so
that a run can be repeated, and so that runs of different seeds try different cases.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable


def drawn_cases(cases: Iterable[str], size: int, seed: str) -> set[str]:
    """Returns the cases to run: of each test at most `size`, drawn by `seed`.

    `cases` are pytest's node IDs, in which a test's name ends where its parameters begin.
    """
    cases_of_tests = defaultdict(list)
    for case in cases:
        cases_of_tests[case.partition("[")[0]].append(case)

    def place(case: str) -> bytes:
        return hashlib.sha256(f"{seed} {case}".encode()).digest()

    return {
        case for of_test in cases_of_tests.values() for case in sorted(of_test, key=place)[:size]
    }
