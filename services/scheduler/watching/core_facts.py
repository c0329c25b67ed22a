"""The facts of a scheduling core: the settings from which an equal core can be created again."""

from collections.abc import Callable

from pydantic import BaseModel, ConfigDict, Field

from services.scheduler.core.drafting.drafter import Drafter
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.memory.kv_groups import BlockGroups
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.order.order import Order, OrderOptions
from services.scheduler.core.order.registry import ORDERS, OrderName
from services.scheduler.core.policies import PolicyOptions
from services.scheduler.core.policies.registry import PolicyName, policy_of
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler


class DraftFacts(BaseModel):
    """The limits of speculative drafts in a scheduling core."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_drafts: int
    max_batch_tokens: int


class CoreFacts(BaseModel):
    """The settings from which an equal scheduling core can be made. Requests that an earlier core
    left in the pool are not included."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    is_first: bool
    """Whether the core is the first one of its process, so that its pool has never had a
    request."""
    pipeline: int = 0
    """Number of the core's pipeline. Cores with the same number, one after the other, use the same
    `RequestPool`."""
    policy: PolicyName
    max_batch_size: int
    max_batch_tokens: int | None
    n_shares: int
    vector_share: float | None = None
    pipeline_depth: int
    token_hand_off: bool
    n_blocks: int = Field(le=2**24)
    block_size: int
    windows: tuple[int | None, ...] = (None,)
    """Attention windows of the model's K/V groups, in tokens; None for a group that attends to all
    tokens."""
    has_prefix_cache: bool
    is_optimistic: bool
    max_rows: int | None = None
    drafts: DraftFacts | None
    order: OrderName
    ageing_s: float
    fair_batch_tokens: int | None = None
    max_requests: int
    max_tokens: int
    build: str = ""
    """Name of the build of the pipeline's workers."""


def facts_of(scheduler: Scheduler, *, is_first: bool, pipeline: int = 0) -> CoreFacts:
    """Returns the settings from which an equal scheduling core can be made. `pipeline` is the
    number of the core's pipeline. `is_first` says whether it is the first core of its process."""
    kv_manager, pool, drafter = scheduler.kv_manager, scheduler.pool, scheduler.drafter
    policy, order = scheduler.policy, pool.order
    policy_options, order_options = policy.options, order.options
    drafts = None
    if drafter is not None:
        drafts = DraftFacts(
            max_drafts=drafter.max_drafts, max_batch_tokens=drafter.max_batch_tokens
        )
    return CoreFacts(
        is_first=is_first,
        pipeline=pipeline,
        policy=policy.name,
        max_batch_size=policy_options.max_batch_size,
        max_batch_tokens=policy_options.max_batch_tokens,
        n_shares=policy_options.n_shares,
        vector_share=policy_options.vector_share,
        pipeline_depth=scheduler.pipeline_depth,
        token_hand_off=scheduler.token_hand_off,
        n_blocks=kv_manager.n_blocks,
        block_size=kv_manager.block_size,
        windows=tuple(kv_manager.groups.windows),
        has_prefix_cache=kv_manager.has_prefix_cache,
        is_optimistic=kv_manager.expected_use.may_be_exceeded,
        max_rows=kv_manager.rows.max_rows,
        drafts=drafts,
        order=order.name,
        ageing_s=order_options.ageing_s,
        fair_batch_tokens=order_options.batch_tokens,
        max_requests=pool.max_requests,
        max_tokens=pool.max_tokens,
        build=pool.build,
    )


def core_of(facts: CoreFacts, pool: RequestPool) -> Scheduler:
    """Returns a new scheduling core with the given facts, which schedules the requests of `pool`.

    Raises:
        ValueError: no core can have these facts.
    """
    drafts = facts.drafts
    policy = policy_of(
        facts.policy,
        PolicyOptions(
            facts.max_batch_size,
            facts.max_batch_tokens,
            facts.n_shares,
            vector_share=facts.vector_share,
        ),
    )
    drafter = None
    if drafts is not None:
        drafter = Drafter(max_drafts=drafts.max_drafts, max_batch_tokens=drafts.max_batch_tokens)
    return Scheduler(
        pool,
        KVManager(
            n_blocks=facts.n_blocks,
            block_size=facts.block_size,
            groups=BlockGroups(
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
        build=facts.build,
    )


def order_of(facts: CoreFacts, now: Callable[[], float]) -> Order:
    """Returns an empty order of waiting requests, of the kind that the facts name, for the pool of
    a core. `now` returns the time in seconds."""
    return ORDERS[facts.order].of(OrderOptions(facts.ageing_s, facts.fair_batch_tokens), now)
