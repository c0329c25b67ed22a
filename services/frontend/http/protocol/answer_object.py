"""Name of the query parameter by which a viewer asks for the input of the scheduling core in
addition to the events."""

from pydantic import ConfigDict, with_config

answer_object = with_config(ConfigDict(extra="forbid"))
"""Decorator that forbids additional fields in a typed dictionary."""
