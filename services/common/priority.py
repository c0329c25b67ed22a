"""The priorities of requests, which both services check."""

from services.common.sampling import WholeNumbers

DEFAULT_PRIORITY = 0
"""Priority of a request that names none; to come earlier a key must be allowed to."""

PRIORITIES = WholeNumbers(-10, 10)
"""Priorities that there are; lower ones come earlier, as in vLLM. Each may be a class of its own in
the scheduler, which looks at all that wait: few are enough."""
