"""Types of answers: typed dictionaries that have no other fields.

Replies build them, mypy holds that, and the OpenAPI document describes them. What stands below a
field is the field's description there.
"""

from pydantic import ConfigDict, with_config

answer_object = with_config(ConfigDict(extra="forbid"))
"""Makes a typed dictionary the type of an object that has these fields and no others."""
