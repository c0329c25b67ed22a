"""The keywords of JSON schemas that narrow the set of values which a schema allows, in groups.

Formats of tool calls in which arguments are not JSON enforce only some of these keywords.
"""

COMBINING = ("allOf", "anyOf", "oneOf")
"""Keywords that combine several schemas for one value."""

OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_LISTS = ("prefixItems", "items", "minItems", "maxItems")

COUNTS_AND_PATTERNS = ("patternProperties", "minProperties", "maxProperties")
"""Keywords that narrow the members of an object other than the declared members: patterns for the
names of members, and bounds on the number of members."""

OF_OBJECTS = ("properties", "required", "additionalProperties", *COUNTS_AND_PATTERNS)

ALL = (*COMBINING, *OF_STRINGS, *OF_NUMBERS, *OF_LISTS, *OF_OBJECTS)
