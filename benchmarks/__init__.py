"""Programs that measure Orcinus and print tables. A table in the docs is quoted with its
command."""
