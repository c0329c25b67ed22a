"""Typed dictionaries as the types of answers: no fields but the declared ones."""

from pydantic import ConfigDict, with_config

answer_object = with_config(ConfigDict(extra="forbid"))
"""Decorator that forbids additional fields in a typed dictionary."""
