"""The facts from which a scheduling core can be made again."""

from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from services.scheduler.core.drafts import Drafter
from services.scheduler.core.expected_use import ExpectedUse
from services.scheduler.core.fair_batch import FairBatch
from services.scheduler.core.fair_order import Fair
from services.scheduler.core.kv_groups import KVGroups
from services.scheduler.core.kv_manager import KVManager
from services.scheduler.core.order import FirstComeFirstServed, Order
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler


class DraftFacts(BaseModel):
    """The limits of drafts."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_drafts: int
    max_batch_tokens: int


class CoreFacts(BaseModel):
    """All facts of a core, but for the requests that the core before it left in the pool."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    is_first: bool
    """Whether the core's pool has never had a request."""
    policy: Literal["orca", "chunked"]
    max_batch_size: int
    max_batch_tokens: int | None
    n_shares: int
    pipeline_depth: int
    token_hand_off: bool
    n_blocks: int = Field(le=2**24)
    block_size: int
    windows: tuple[int | None, ...] = (None,)
    """Attention windows of the model's K/V groups; None attends to all tokens."""
    has_prefix_cache: bool
    is_optimistic: bool
    max_rows: int | None = None
    drafts: DraftFacts | None
    order: Literal["fcfs", "fair"]
    ageing_s: float
    fair_batch_tokens: int | None = None
    max_requests: int
    max_tokens: int


def facts_of(scheduler: Scheduler, *, is_first: bool) -> CoreFacts | None:
    """Returns the facts of a core; None for a policy that this version does not know."""
    policy, kv_manager, pool = scheduler.policy, scheduler.kv_manager, scheduler.pool
    if not isinstance(policy, OrcaPolicy | ChunkedPolicy):
        return None
    drafter, order = scheduler.drafter, pool.order
    chunked = policy if isinstance(policy, ChunkedPolicy) else None
    drafts = None
    if drafter is not None:
        drafts = DraftFacts(
            max_drafts=drafter.max_drafts, max_batch_tokens=drafter.max_batch_tokens
        )
    return CoreFacts(
        is_first=is_first,
        policy="orca" if chunked is None else "chunked",
        max_batch_size=policy.max_batch_size,
        max_batch_tokens=None if chunked is None else chunked.max_batch_tokens,
        n_shares=1 if chunked is None else chunked.n_shares,
        pipeline_depth=scheduler.pipeline_depth,
        token_hand_off=scheduler.token_hand_off,
        n_blocks=kv_manager.n_blocks,
        block_size=kv_manager.block_size,
        windows=tuple(kv_manager.groups.windows),
        has_prefix_cache=kv_manager.prefix_cache is not None,
        is_optimistic=kv_manager.expected_use is not None,
        max_rows=kv_manager.max_rows,
        drafts=drafts,
        order="fair" if isinstance(order, Fair) else "fcfs",
        ageing_s=order.ageing_s if isinstance(order, Fair) else 1.0,
        fair_batch_tokens=order.batch.max_tokens
        if isinstance(order, Fair) and order.batch
        else None,
        max_requests=pool.max_requests,
        max_tokens=pool.max_tokens,
    )


def core_of(facts: CoreFacts, pool: RequestPool) -> Scheduler:
    """Returns a core that is made of facts and has the requests of a pool.

    Raises:
        ValueError: no core can have these facts.
    """
    drafts, policy = facts.drafts, _policy_of(facts)
    drafter = None
    if drafts is not None:
        drafter = Drafter(max_drafts=drafts.max_drafts, max_batch_tokens=drafts.max_batch_tokens)
    return Scheduler(
        pool,
        KVManager(
            n_blocks=facts.n_blocks,
            block_size=facts.block_size,
            groups=KVGroups(
                facts.windows,
                policy.max_span_tokens,
                max_drafts=0 if drafter is None else drafter.max_drafts,
            ),
            has_prefix_cache=facts.has_prefix_cache,
            expected_use=ExpectedUse() if facts.is_optimistic else None,
            max_rows=facts.max_rows,
        ),
        policy=policy,
        pipeline_depth=facts.pipeline_depth,
        token_hand_off=facts.token_hand_off,
        drafter=drafter,
    )


def order_of(facts: CoreFacts, now: Callable[[], float]) -> Order:
    """Returns an empty order for a core's pool; `now` is its clock."""
    if facts.order == "fcfs":
        return FirstComeFirstServed()
    n_tokens = facts.fair_batch_tokens
    return Fair(
        ageing_s=facts.ageing_s, now=now, batch=None if n_tokens is None else FairBatch(n_tokens)
    )


def _policy_of(facts: CoreFacts) -> Policy:
    if facts.max_batch_tokens is None:
        return OrcaPolicy(max_batch_size=facts.max_batch_size)
    return ChunkedPolicy(
        max_batch_size=facts.max_batch_size,
        max_batch_tokens=facts.max_batch_tokens,
        n_shares=facts.n_shares,
    )
