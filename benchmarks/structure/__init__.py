"""The structure of the source tree in numbers, with which two versions can be compared.

    python -m benchmarks.structure                             the working tree
    python -m benchmarks.structure --rev 71e8561 --rev HEAD    two revisions side by side
    python -m benchmarks.structure --minutes 'default suite'=junit.xml --minutes CI=45
    python -m benchmarks.structure --docstrings 150 --seed 7   docstrings for a reader to mark

Prints a table in Markdown with a column for each tree. Modules are parsed and never imported, so a
revision needs no environment.
"""
