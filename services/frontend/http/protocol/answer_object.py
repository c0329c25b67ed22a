"""Types of answers: typed dictionaries without additional fields.

Replies build the dictionaries, mypy checks the fields, and the OpenAPI document describes the
types. The docstring below a field is the description of the field in the OpenAPI document.
"""

from pydantic import ConfigDict, with_config

answer_object = with_config(ConfigDict(extra="forbid"))
"""Decorator that forbids additional fields in a typed dictionary."""
