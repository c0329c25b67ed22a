"""Programs that use other people's clients as users do. They run in an environment of their own,
and import nothing of the project."""
