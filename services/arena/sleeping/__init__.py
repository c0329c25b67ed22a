"""Ranks that compute nothing: they sleep for the time that an iteration takes on a given
machine."""
