"""The priorities of requests, which frontend and scheduler both check."""

from services.common.sampling import WholeNumbers

DEFAULT_PRIORITY = 0
"""Priority of a request that names none; only keys with permission may ask for an earlier one."""

PRIORITIES = WholeNumbers(-10, 10)
"""The priorities, from the first to be served to the last; lower numbers come first, as in vLLM.

Each number may become a class of its own in the scheduler, which looks at all classes that have
waiting requests, so there are few.
"""
