"""The priorities of requests. Both the frontend and the scheduler check them."""

from services.common.sampling import WholeNumbers

DEFAULT_PRIORITY = 0
"""Priority of a request that states none. Only API keys with permission may use more urgent
priorities."""

PRIORITIES = WholeNumbers(-10, 10)
"""The valid priorities. Lower numbers are served first, as in vLLM.

There are few priorities, because the scheduler looks at each priority that has waiting requests.
"""
