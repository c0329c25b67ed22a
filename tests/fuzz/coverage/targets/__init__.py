"""The targets, a file for each."""
