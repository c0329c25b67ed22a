"""Decorator for the typed dictionaries that are the types of answers."""

from pydantic import ConfigDict, with_config

answer_object = with_config(ConfigDict(extra="forbid"))
"""Decorator that forbids additional fields in a typed dictionary."""
