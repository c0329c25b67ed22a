"""Programs that measure Orcinus. They print tables; docs quote them with the command beside."""
