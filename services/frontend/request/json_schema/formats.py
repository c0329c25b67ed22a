"""The values of the keyword `format` that are enforced. Any other value constrains nothing.

Dates and times are enforced by patterns of this module, after RFC 3339, because the grammar
engine's own formats accept days that do not exist, and leap seconds at any time. The patterns allow
no leap seconds, because hardly any parser of dates accepts them.
"""

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)

PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
"""Regular expression for each format that is enforced by a pattern."""

NATIVE = {"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
"""Formats that the grammar engine enforces itself."""
