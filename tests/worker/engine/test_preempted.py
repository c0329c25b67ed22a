"""Requests that are put down for the memory of others get the tokens that they get alone."""

from pathlib import Path

import pytest

from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from tests.scheduler.core.workload import build
from tests.worker.engine.test_scheduled_runs import WANTS, Rank, serve
from tests.worker.engine.test_scheduled_runs import make_alone as make_alone
from tests.worker.engine.test_scheduled_runs import make_checkpoint as make_checkpoint


@pytest.mark.parametrize("has_prefix_cache", [False, True], ids=["", "cache"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "policy",
    [OrcaPolicy(max_batch_size=4), ChunkedPolicy(max_batch_size=4, max_batch_tokens=7)],
    ids=["orca", "chunked"],
)
def test_tokens_do_not_depend_on_who_was_preempted(
    checkpoint: Path, alone: list[list[int]], policy: Policy, depth: int, has_prefix_cache: bool
) -> None:
    use = ExpectedUse()
    use.share = 0.0
    scheduler = build(
        max_batch_size=4,
        n_blocks=9,
        block_size=4,
        pipeline_depth=depth,
        token_hand_off=True,
        policy=policy,
        has_prefix_cache=has_prefix_cache,
        expected_use=use,
    )
    requests = [want.request(index) for index, want in enumerate(WANTS)]
    serve(Rank(checkpoint), scheduler, requests)
    assert [list(request.generated_token_ids) for request in requests] == alone
    assert sum(request.n_preemptions for request in requests) > 0
