"""Whatever options the scheduler lets through, a rank takes and samples a token with: what a rank
refuses ends it, and with it the requests of everybody."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from orcinus.v1 import sampling_pb2, scheduler_pb2

from kernels import TORCH
from kernels.upload import Uploads
from services.common.errors import InvalidRequest
from services.common.sampling import (
    MAX_STOP_TOKENS,
    OPTIONS,
    Numbers,
    SamplingParams,
    Texts,
    TokenBiases,
    TokenLists,
    TokenSequences,
    WholeNumbers,
)
from services.common.sampling_proto import from_proto, to_proto
from services.scheduler.submission import check_sampling
from services.worker.engine.model_runner import both
from services.worker.engine.plan import Admission, IterationPlan
from services.worker.engine.request_table import RequestTable

VOCAB_SIZE = 2000
EOS = (3, 5, VOCAB_SIZE + 7)  # the last is none of the model's logits, as some configurations have
PIPELINE = scheduler_pb2.PipelineDescription(
    vocab_size=VOCAB_SIZE, eos_token_ids=EOS, can_follow_grammars=True
)
TOKENS = st.integers(0, VOCAB_SIZE - 1)


class AnyText:
    """The grammar, and the place in it, of outputs that may be anything."""

    is_cut = False

    def begin_iteration(self) -> None:
        pass

    def matcher(self, digest: bytes) -> "AnyText":
        return self

    def take(self, token_id: int) -> None:
        assert 0 <= token_id < VOCAB_SIZE

    def mask(self) -> bytes:
        return b"\xff" * (-(-VOCAB_SIZE // 32) * 4)


def tokens_up_to(n: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Some tokens, and lists that are as long as they may be."""
    longest = st.integers(0, VOCAB_SIZE - 1).map(
        lambda start: tuple((start + i) % VOCAB_SIZE for i in range(n))
    )
    return st.one_of(st.lists(TOKENS, max_size=8).map(tuple), longest)


def extremes(name: str) -> st.SearchStrategy[Any]:
    """The values of an option that a client may give, its limits first."""
    match OPTIONS[name].allowed:
        case Numbers(low, high):
            return st.sampled_from([low, high]) | st.floats(low, high, width=32)
        case WholeNumbers(low, high):
            return st.sampled_from([low, high]) | st.integers(low, high)
        case TokenLists(max_length):
            return tokens_up_to(max_length)
        case TokenSequences(max_tokens):
            words = st.lists(TOKENS, min_size=1, max_size=4).map(tuple)
            longest = tokens_up_to(max_tokens).filter(bool).map(lambda one: (one,))
            return st.one_of(st.lists(words, max_size=8).map(tuple), longest)
        case TokenBiases(max_length, low, high):
            values = st.sampled_from([low, high]) | st.floats(low, high, width=32)
            ids = tokens_up_to(max_length).map(lambda given: sorted(set(given)))
            return st.tuples(ids, values).map(lambda both: tuple((i, both[1]) for i in both[0]))
        case Texts(max_length):
            return st.sampled_from(["", "x", "x" * max_length])


CLIENTS = st.fixed_dictionaries({}, optional={name: extremes(name) for name in OPTIONS})


@example(given={"stop_token_ids": tuple(range(100, 100 + MAX_STOP_TOKENS))}, is_ignored=False)
@given(given=CLIENTS, is_ignored=st.booleans())
def test_a_rank_takes_whatever_the_scheduler_lets_through(
    given: dict[str, Any], is_ignored: bool
) -> None:
    given = {"seed": 0, **given}
    if not is_ignored:  # as the frontend adds them
        given["stop_token_ids"] = (*given.get("stop_token_ids", ()), *EOS)
    wire = to_proto(SamplingParams(**given)).SerializeToString()
    params = from_proto(sampling_pb2.SamplingParams.FromString(wire))
    refusal = refusal_of(params)
    if refusal:  # each option is within its limits, but not with the others
        assert "leave no token" in refusal or "not together" in refusal
        return
    table = RequestTable(
        n_kv_blocks=4, block_size=4, vocab_size=VOCAB_SIZE, max_model_len=16, grammars=AnyText()
    )
    table.apply(prefill(params))
    rows, positions = np.array([0]), np.array([3])
    columns = table.sampling(rows, positions).columns(Uploads(), VOCAB_SIZE)
    constrained = table.constraints.rows_of(rows, positions)
    if constrained is not None:
        masks = table.constraints.masks(constrained, Uploads())
        columns = replace(columns, allowed=both(columns.allowed, masks))
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 9, (1, VOCAB_SIZE)))
    [token] = TORCH.sample(logits.float(), columns).tolist()
    assert 0 <= token < VOCAB_SIZE
    assert token not in params.bad_token_ids
    assert not params.allowed_token_ids or token in params.allowed_token_ids
    assert (token,) not in params.bad_words
    assert not params.min_tokens or token not in params.stop_token_ids


def refusal_of(params: SamplingParams) -> str:
    try:
        check_sampling(params, PIPELINE)
    except InvalidRequest as error:
        return error.message
    return ""


def prefill(params: SamplingParams) -> IterationPlan:
    """A prompt of three tokens, after which one is sampled."""
    return IterationPlan(
        iteration=1,
        released_rows=(),
        admissions=(Admission(0, 3, params),),
        rows=(0,),
        start_positions=(0,),
        n_tokens=(3,),
        sample=(True,),
        n_new_blocks=(1,),
        token_on_rank=(False,),
        token_ids=(1, 2, 3),
        new_block_ids=(0,),
    )
