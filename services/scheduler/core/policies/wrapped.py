"""A policy that passes every call on to another policy: a base for policies that observe another
one."""

from collections.abc import Collection, Sequence
from typing import Any

from services.scheduler.core.policies import MemoryView, Policy, PoolView, Selection
from services.scheduler.core.request import Request


class WrappedPolicy(Policy):
    """A policy around an inner policy, with the name, the options and the limits of the inner
    policy."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.options)
        self.policy = policy
        """The inner policy."""
        self.max_batch_size = policy.max_batch_size
        self.max_span_tokens = policy.max_span_tokens
        self.max_tokens = policy.max_tokens
        self.prompt_groups = policy.prompt_groups
        # These belong to classes, and a wrapper has those of the policy that it was made for.
        own: dict[str, Any] = vars(self)
        for name in ("name", "keeps_order", "takes_drafts"):
            own[name] = getattr(policy, name)

    def select(self, pool: PoolView, kv_manager: MemoryView) -> list[Selection]:
        """Returns the selection of the inner policy."""
        return self.policy.select(pool, kv_manager)

    def is_full(self, ready: Sequence[Request]) -> bool:
        """Returns whether the running requests `ready` fill the next batch of the inner policy."""
        return self.policy.is_full(ready)

    def answered_with(self, request: Request) -> Collection[Request]:
        """Returns the requests that must all be complete before the answer of `request` is
        returned."""
        return self.policy.answered_with(request)
