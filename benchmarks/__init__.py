"""Programs that measure Orcinus and print tables; docs quote a table with the command that made
it."""
