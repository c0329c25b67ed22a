"""Builds the scheduling core of a pipeline from the settings, and describes the pipeline for
frontends."""

import time
from collections.abc import Callable, Sequence

from orcinus.v1 import scheduler_pb2

from services.common.adapters import adapters_in, max_loaded_in
from services.common.errors import Unavailable
from services.common.pooling import pooling_in
from services.scheduler.core.drafting.drafter import Drafter
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.memory.kv_groups import BlockGroups
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.order.order import Order, OrderOptions
from services.scheduler.core.order.registry import ORDERS
from services.scheduler.core.policies import Policy, PolicyOptions
from services.scheduler.core.policies.registry import policy_of
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.fit import build_of, traits_of
from services.scheduler.pipeline.membership import Pipeline
from services.scheduler.settings import SchedulerSettings

BuildScheduler = Callable[[SchedulerSettings, Pipeline, RequestPool], Scheduler]
"""A function that makes the scheduling core of a pipeline from settings, the pipeline and its pool.
The pool may have requests of earlier pipelines."""


def build_scheduler(
    settings: SchedulerSettings,
    pipeline: Pipeline,
    pool: RequestPool,
    *,
    make: type[Scheduler] = Scheduler,
    policy: Policy | None = None,
) -> Scheduler:
    """Returns the scheduling core of a pipeline, with the pipeline's K/V memory and its limit of
    batches in flight. If `policy` is None, the core gets the policy that the settings name. `make`
    is the class of the core.

    Raises:
        Unavailable: there is no memory for one block in each K/V group.
    """
    traits = pipeline.first.traits
    pool.adapters.begin(adapters_in(traits).values(), max_loaded_in(traits))
    has_one_stage = pipeline.n_stages == 1
    depth = settings.pipeline_depth or default_depth(pipeline.n_stages)
    if policy is None:
        policy = build_policy(settings, n_shares=1 if has_one_stage else depth)
    # Algorithm 1, for example, knows no drafts.
    drafter = build_drafter(settings, pipeline) if policy.takes_drafts else None
    return make(
        pool,
        build_kv_manager(settings, pipeline, policy, drafter),
        policy=policy,
        pipeline_depth=depth,
        token_hand_off=has_one_stage,
        drafter=drafter,
        build=build_of(traits_of(pipeline.first)),
    )


def default_depth(n_stages: int) -> int:
    """Returns the default for the largest number of batches in flight. A pipeline with one stage
    has two batches, which hold the same requests: a rank keeps the last tokens of the first batch
    for the second, so the second batch needs no result. A pipeline with several stages has one
    batch for each stage. One batch more would hide the time that results and plans need to travel,
    but would divide the requests among more and smaller batches."""
    return max(2, n_stages)


def build_kv_manager(
    settings: SchedulerSettings, pipeline: Pipeline, policy: Policy, drafter: Drafter | None = None
) -> KVManager:
    """Returns the manager of a pipeline's K/V memory, for the longest spans and drafts that the
    policy and the drafter make.

    Raises:
        Unavailable: there is no memory for one block in each K/V group.
    """
    block_size, n_groups = pipeline.first.block_size, len(pipeline.kv_windows)
    n_blocks = pipeline.n_kv_blocks
    if settings.n_slots is not None:
        n_blocks = min(n_blocks, settings.n_slots // block_size * n_groups)
    if n_blocks == 0:
        raise Unavailable(f"n_slots: {settings.n_slots} is less than a block of {block_size} slots")
    if n_blocks < n_groups:
        raise Unavailable(
            f"the stages have memory for {n_blocks} K/V blocks, and a request has {n_groups} at "
            "least, one in each K/V group"
        )
    return KVManager(
        n_blocks=n_blocks,
        block_size=block_size,
        groups=BlockGroups(
            pipeline.kv_windows,
            policy.max_span_tokens,
            max_drafts=0 if drafter is None else drafter.max_drafts,
        ),
        # The state of a request is kept in no block: a request that began with cached blocks of
        # another request would lack the state.
        has_prefix_cache=settings.prefix_cache and pipeline.n_state_rows is None,
        max_rows=pipeline.n_state_rows,
        expected_use=ExpectedUse() if settings.admission == "optimistic" else None,
    )


def build_drafter(settings: SchedulerSettings, pipeline: Pipeline) -> Drafter | None:
    """Returns the drafter, or None if no tokens are drafted.

    No tokens are drafted if the settings ask for none, or if the model keeps a state of each
    request, because a refused draft cannot be removed from a state. No tokens are drafted either if
    stages record decodes (CUDA graphs): spans of several tokens are not recorded, so drafts would
    not make an iteration faster.
    """
    if not settings.speculative_tokens:
        return None
    if pipeline.n_state_rows is not None:
        return None
    if any(member.description.records_decodes for member in pipeline.members):
        return None
    limits = (settings.speculative_batch_tokens, settings.max_batch_tokens)
    return Drafter(
        max_drafts=settings.speculative_tokens,
        max_batch_tokens=min(filter(None, (*limits, settings.fair_batch_tokens))),
    )


def build_order(settings: SchedulerSettings, *, now: Callable[[], float] = time.monotonic) -> Order:
    """Returns the order of requests that the settings name. The order has no requests yet. `now`
    returns the time in seconds."""
    return ORDERS[settings.order].of(
        OrderOptions(settings.ageing_s, settings.fair_batch_tokens), now
    )


def build_policy(settings: SchedulerSettings, *, n_shares: int) -> Policy:
    """Returns the policy that the settings name. `n_shares` is the number of batches in flight
    among which the policy divides the requests."""
    return policy_of(
        settings.policy,
        PolicyOptions(
            settings.max_batch_size,
            settings.max_batch_tokens,
            n_shares,
            vector_share=settings.vector_share,
        ),
    )


def _max_whole_prompt(pipeline: Pipeline, policy: Policy) -> Sequence[int]:
    """Returns a sequence with one number: how many tokens a prompt may have if it must run in one
    iteration. The sequence is empty if the model can run prompts in chunks, or if the policy does
    not limit the tokens of a request in an iteration."""
    pooling = pooling_in(pipeline.first.traits)
    if pooling is None or not pooling.runs_whole or policy.max_span_tokens is None:
        return ()
    return (policy.max_span_tokens,)


def describe(pipeline: Pipeline, scheduler: Scheduler) -> scheduler_pb2.PipelineDescription:
    """Returns the description of a pipeline that frontends get."""
    first = pipeline.first
    return scheduler_pb2.PipelineDescription(
        model=first.model,
        vocab_size=first.vocab_size,
        max_model_len=min(
            first.max_model_len,
            scheduler.kv_manager.max_sequence_len,
            scheduler.pool.max_tokens,
            *_max_whole_prompt(pipeline, scheduler.policy),
        ),
        eos_token_ids=first.eos_token_ids,
        can_follow_grammars=pipeline.members[-1].description.can_follow_grammars,
        n_stages=pipeline.n_stages,
        tp_size=first.tp_size,
        traits=first.traits,
        build=build_of(traits_of(first)),
    )
