"""Programs that measure Orcinus and print tables. The docs quote such a table together with the
command that prints it."""
