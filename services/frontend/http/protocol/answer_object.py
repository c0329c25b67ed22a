"""How answers are described for the OpenAPI document: typed dictionaries that have no other fields.

Tests hold what a server says against them.
"""

from pydantic import ConfigDict, with_config

answer_object = with_config(ConfigDict(extra="forbid"))
"""Makes a typed dictionary the description of an object that has these fields and no others."""
