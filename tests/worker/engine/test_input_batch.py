"""Ranks remember requests, refuse what breaks the protocol, and lay batches out."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import ops_for
from kernels.upload import StagedUploads, Uploads
from services.common.sampling import SamplingParams
from services.worker.engine.input_batch import BatchBuilder, DecodeShape, InputBatch
from services.worker.engine.plan import Admission, IterationPlan, PlanError, Spans
from services.worker.engine.request_table import RequestTable
from services.worker.engine.sampler import SamplingBatch
from tests.worker.pipeline import GREEDY

BLOCK_SIZE = 4
KEY_CACHE = torch.zeros(40, BLOCK_SIZE, 1, 2)


def make_table(*, keeps_tokens: bool = True) -> RequestTable:
    return RequestTable(
        n_kv_blocks=40,
        block_size=BLOCK_SIZE,
        vocab_size=100,
        max_model_len=64,
        keeps_tokens=keeps_tokens,
    )


def make_plan(**columns: Any) -> IterationPlan:
    """A plan that does nothing but what is given."""
    names = IterationPlan.__dataclass_fields__
    none_left_out = (False,) * len(columns.get("rows", ()))
    defaults = {**dict.fromkeys(names, ()), "iteration": 1, "token_on_rank": none_left_out}
    return IterationPlan(**{**defaults, **columns})


def admit(row: int, n_prompt_tokens: int = 6, sampling: SamplingParams = GREEDY) -> Admission:
    return Admission(row, n_prompt_tokens, sampling)


# Row 3 runs 6 tokens in blocks 8 and 2; row 1 runs 1 token in block 5.
FIRST = make_plan(
    iteration=1,
    admissions=(admit(3), admit(1, 1)),
    rows=(3, 1),
    start_positions=(0, 0),
    n_tokens=(6, 1),
    sample=(True, False),
    n_new_blocks=(2, 1),
    token_ids=(10, 11, 12, 13, 14, 15, 20),
    new_block_ids=(8, 2, 5),
)
# Then row 1 decodes within its block, and row 3 goes on into a new one.
SECOND = make_plan(
    iteration=2,
    rows=(1, 3),
    start_positions=(1, 6),
    n_tokens=(1, 3),
    sample=(True, True),
    n_new_blocks=(0, 1),
    token_ids=(21, 16, 17, 18),
    new_block_ids=(30,),
)


def builder_of(
    table: RequestTable,
    uploads: Uploads | None = None,
    *,
    builder: type[BatchBuilder] = BatchBuilder,
) -> BatchBuilder:
    return builder(
        table,
        ops=ops_for(torch.device("cpu")),
        key_caches=[KEY_CACHE],
        n_heads=1,
        uploads=uploads or Uploads(),
        vocab_size=100,
    )


def build(
    plan: IterationPlan, table: RequestTable, *, builder: type[BatchBuilder] = BatchBuilder
) -> InputBatch:
    return builder_of(table, builder=builder).build(table.apply(plan))


def sampling_of(plan: IterationPlan, table: RequestTable) -> SamplingBatch:
    spans = table.apply(plan)
    return table.sampling(
        spans.rows[spans.sample], (spans.start_positions + spans.n_tokens)[spans.sample]
    )


class TestLayout:
    def test_flattens_spans_and_finds_their_slots(self) -> None:
        table = make_table()
        first = build(FIRST, table)
        assert first.token_ids.tolist() == [10, 11, 12, 13, 14, 15, 20]
        assert first.positions.tolist() == [0, 1, 2, 3, 4, 5, 0]
        assert first.kv[0].slots.tolist() == [32, 33, 34, 35, 8, 9, 20]
        assert first.sampled_tokens.tolist() == [5]
        assert first.sampled_rows.tolist() == [3]
        second = build(SECOND, table)
        assert second.token_ids.tolist() == [21, 16, 17, 18]
        assert second.positions.tolist() == [1, 6, 7, 8]
        assert second.kv[0].slots.tolist() == [21, 10, 11, 120]
        assert second.sampled_tokens.tolist() == [0, 3]

    def test_a_released_row_starts_over(self) -> None:
        table = make_table()
        build(FIRST, table)
        again = build(
            make_plan(
                released_rows=(3,),
                admissions=(admit(3, 2),),
                rows=(3,),
                start_positions=(0,),
                n_tokens=(2,),
                sample=(True,),
                n_new_blocks=(1,),
                token_ids=(1, 2),
                new_block_ids=(7,),
            ),
            table,
        )
        assert again.kv[0].slots.tolist() == [28, 29]

    @given(data=st.data())
    def test_any_requests_keep_their_tokens_apart(self, data: st.DataObject) -> None:
        table = make_table()
        free = data.draw(st.permutations(range(40)))
        rows = data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=5, unique=True))
        tables: dict[int, list[int]] = {row: [] for row in rows}
        stored = dict.fromkeys(rows, 0)
        admitted: set[int] = set()
        for _ in range(4):
            chosen = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
            counts = [data.draw(st.integers(1, 7)) for _ in chosen]
            new = []
            expected = []
            for row, n in zip(chosen, counts, strict=True):
                n_missing = -(-(stored[row] + n) // BLOCK_SIZE) - len(tables[row])
                new.append([free.pop() for _ in range(n_missing)])
                tables[row] += new[-1]
                for position in range(stored[row], stored[row] + n):
                    block = tables[row][position // BLOCK_SIZE]
                    expected.append((position, block * BLOCK_SIZE + position % BLOCK_SIZE))
            batch = build(
                make_plan(
                    admissions=[admit(row) for row in chosen if row not in admitted],
                    rows=chosen,
                    start_positions=[stored[row] for row in chosen],
                    n_tokens=counts,
                    sample=[False] * len(chosen),
                    n_new_blocks=[len(blocks) for blocks in new],
                    token_ids=[0] * sum(counts),
                    new_block_ids=[block for blocks in new for block in blocks],
                ),
                table,
            )
            admitted.update(chosen)
            for row, n in zip(chosen, counts, strict=True):
                stored[row] += n
            ours = zip(batch.positions.tolist(), batch.kv[0].slots.tolist(), strict=True)
            assert list(ours) == expected


class TestTokensOnTheRank:
    def test_are_those_that_were_sampled_last_whatever_else_is_in_the_batch(self) -> None:
        table = make_table()
        first = build(replace(FIRST, sample=(True, True)), table)
        table.keep_tokens(first.sampled_rows, np.array([77, 55]))
        mixed = make_plan(
            admissions=(admit(0, 2),),
            rows=(1, 0, 3),
            start_positions=(1, 0, 6),
            n_tokens=(1, 2, 1),
            sample=(True, True, True),
            n_new_blocks=(0, 1, 0),
            token_on_rank=(True, False, True),
            token_ids=(40, 41),
            new_block_ids=(9,),
        )
        batch = build(mixed, table)
        assert batch.token_ids.tolist() == [55, 40, 41, 77]
        table.keep_tokens(batch.sampled_rows, np.array([56, 42, 78]))
        decode = make_plan(
            rows=(0, 1, 3),
            start_positions=(2, 2, 7),
            n_tokens=(1, 1, 1),
            sample=(True, True, True),
            n_new_blocks=(0, 0, 0),
            token_on_rank=(True, True, True),
        )
        assert build(decode, table).token_ids.tolist() == [42, 56, 78]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({}, "row 1 leaves out a token that is not on the rank"),
            ({"rows": (3,), "start_positions": (6,), "n_tokens": (2,), "token_ids": (1,)},
             "row 3 leaves out more than a token"),
            ({"token_ids": (5,)}, "token_ids has 1 entries"),
            ({"token_on_rank": ()}, "token_on_rank has 0 entries"),
        ],
        ids=["not sampled", "longer", "sent as well", "short column"],
    )  # fmt: skip
    def test_that_are_not_there_are_refused(self, changes: dict[str, Any], message: str) -> None:
        table = make_table()
        build(FIRST, table)
        decode = make_plan(
            rows=(1,),
            start_positions=(1,),
            n_tokens=(1,),
            sample=(True,),
            n_new_blocks=(0,),
            token_on_rank=(True,),
        )
        with pytest.raises(PlanError, match=message):
            build(replace(decode, **changes), table)

    @pytest.mark.parametrize("keeps_tokens", [True, False])
    def test_are_kept_by_ranks_that_embed_and_sample(self, keeps_tokens: bool) -> None:
        table = make_table(keeps_tokens=keeps_tokens)
        batch = build(FIRST, table)
        table.keep_tokens(batch.sampled_rows, np.array([77]))
        decode = make_plan(
            rows=(3,),
            start_positions=(6,),
            n_tokens=(1,),
            sample=(True,),
            n_new_blocks=(0,),
            token_on_rank=(True,),
        )
        if keeps_tokens:
            assert build(decode, table).token_ids.tolist() == [77]
        else:
            with pytest.raises(PlanError, match="row 3 leaves out a token"):
                build(decode, table)

    def test_of_a_row_are_gone_with_its_request(self) -> None:
        table = make_table()
        batch = build(FIRST, table)
        table.keep_tokens(batch.sampled_rows, np.array([77]))
        again = make_plan(
            released_rows=(3,),
            admissions=(admit(3, 1),),
            rows=(3,),
            start_positions=(0,),
            n_tokens=(1,),
            sample=(True,),
            n_new_blocks=(1,),
            token_on_rank=(True,),
            new_block_ids=(7,),
        )
        with pytest.raises(PlanError, match="row 3 leaves out a token"):
            build(again, table)


class TestDecodes:
    SHAPE = DecodeShape(n_spans=4, n_columns=3)

    def decode(self, **columns: Any) -> IterationPlan:
        """Row 1 goes on with a token that is on the rank, and row 3 with 16 in a new block."""
        return make_plan(
            **{
                "rows": (1, 3),
                "start_positions": (1, 6),
                "n_tokens": (1, 1),
                "sample": (True, True),
                "n_new_blocks": (0, 1),
                "token_on_rank": (True, False),
                "token_ids": (16,),
                "new_block_ids": (30,),
                **columns,
            }
        )

    def test_are_padded_with_spans_that_keep_off_real_slots(self) -> None:
        table = make_table()
        first = build(replace(FIRST, sample=(True, True)), table)
        table.keep_tokens(first.sampled_rows, np.array([77, 55]))
        batch = builder_of(table).build_decodes(table.apply(self.decode()), self.SHAPE)
        scratch = 39 * BLOCK_SIZE
        assert batch.token_ids.tolist() == [55, 16, 0, 0]
        assert batch.positions.tolist() == [1, 6, 0, 0]
        assert batch.kv[0].slots.tolist() == [21, 10, scratch, scratch]
        assert batch.sampled_tokens.tolist() == [0, 1]
        assert batch.sampled_rows.tolist() == [1, 3]
        assert (batch.n_spans, batch.shape) == (2, self.SHAPE)

    def test_have_the_same_addresses_whoever_is_in_them(self) -> None:
        table = make_table()
        first = build(replace(FIRST, sample=(True, True)), table)
        table.keep_tokens(first.sampled_rows, np.array([77, 55]))
        uploads = StagedUploads(torch.device("cpu"))
        builder = builder_of(table, uploads)
        buffer = torch.empty(4096, dtype=torch.uint8)
        addresses = []
        for spans in (Spans.none(), table.apply(self.decode())):
            uploads.aim(buffer)
            batch = builder.build_decodes(spans, self.SHAPE)
            read = (batch.token_ids, batch.positions, batch.kv[0].slots)
            addresses.append([tensor.data_ptr() for tensor in read])
        assert addresses[0] == addresses[1]
        assert batch.token_ids.tolist() == [55, 16, 0, 0]
        begin, end = buffer.data_ptr(), buffer.data_ptr() + len(buffer)
        assert all(begin <= address < end for address in addresses[0])


class TestSampling:
    def test_follows_the_rows_in_the_plans_order(self) -> None:
        hot = SamplingParams(
            temperature=1.5, top_k=4, top_p=0.9, min_p=0.1, seed=-1, stop_token_ids=(2,)
        )
        table = make_table()
        build(replace(FIRST, admissions=(admit(3, 6, hot), admit(1, 1))), table)
        sampling = sampling_of(SECOND, table)
        assert sampling.positions.tolist() == [2, 9]
        assert sampling.options["temperature"].tolist() == [0, 1.5]
        assert sampling.options["top_k"].tolist() == [0, 4]
        assert sampling.options["top_p"].tolist() == [1, 0.9]
        assert sampling.options["min_p"].tolist() == pytest.approx([0, 0.1])
        assert sampling.options["seed"].tolist() == [GREEDY.seed, -1]
        assert sampling.banned == ()

    def test_stop_tokens_are_forbidden_until_min_tokens_are_generated(self) -> None:
        table = make_table()
        patient = replace(GREEDY, min_tokens=2, stop_token_ids=(2, 9))
        prompt = make_plan(
            admissions=(admit(0, 3, patient),),
            rows=(0,),
            start_positions=(0,),
            n_tokens=(3,),
            sample=(True,),
            n_new_blocks=(2,),
            token_ids=(1, 2, 3),
            new_block_ids=(0, 1),
        )
        decodes = [
            make_plan(
                rows=(0,),
                start_positions=(position,),
                n_tokens=(1,),
                sample=(True,),
                n_new_blocks=(0,),
                token_ids=(5,),
            )
            for position in (3, 4)
        ]
        banned = [sampling_of(plan, table).banned for plan in (prompt, *decodes)]
        as_lists = [[(row, ids.tolist()) for row, ids in rows] for rows in banned]
        assert as_lists == [[(0, [2, 9])], [(0, [2, 9])], []]
        table = make_table()
        batches = [build(plan, table) for plan in (prompt, *decodes)]
        ids = [batch.sampling.banned_ids.tolist() for batch in batches]
        assert ids == [[2, 9], [2, 9], []]

    def test_tokens_of_penalised_rows_are_counted_where_they_lie(self) -> None:
        table = make_table()
        penalised = replace(GREEDY, presence_penalty=1)
        plan = replace(FIRST, admissions=(admit(3, 4, penalised), admit(1, 1)))
        batch = build(plan, table)
        assert batch.counted is not None
        assert batch.counted.prompt_tokens.tolist() == [0, 1, 2, 3]
        assert batch.counted.prompt_rows.tolist() == [0] * 4
        assert batch.counted.generated_tokens.tolist() == [4, 5]
        assert batch.counted.generated_rows.tolist() == [0] * 2
        assert batch.sampling.penalties is not None
        assert batch.sampling.penalties.rows.tolist() == [0]
        second = build(SECOND, table)
        assert second.counted is not None
        assert second.counted.prompt_tokens.tolist() == []
        assert second.counted.generated_tokens.tolist() == [1, 2, 3]
        assert second.sampling.penalties is not None
        assert second.sampling.penalties.rows.tolist() == [1]
        third = make_plan(
            released_rows=(3,),
            rows=(1,),
            start_positions=(2,),
            n_tokens=(1,),
            sample=(True,),
            n_new_blocks=(0,),
            token_ids=(5,),
        )
        assert build(third, table).counted is None
        assert not table._token_counts.n_reserved

    def test_a_stage_that_does_not_sample_counts_nothing(self) -> None:
        table = RequestTable(
            n_kv_blocks=40, block_size=BLOCK_SIZE, vocab_size=100, max_model_len=64,
            counts_tokens=False,
        )  # fmt: skip
        penalised = replace(GREEDY, repetition_penalty=1.1)
        plan = replace(FIRST, admissions=(admit(3, 6, penalised), admit(1, 1)))
        assert build(plan, table).counted is None


# A scheduler lets neither through: a token below 0 would lie before the logits of its row.
BELOW_ZERO = replace(GREEDY, temperature=1, min_tokens=2, stop_token_ids=(5, -1))
NOT_A_NUMBER = replace(GREEDY, temperature=float("nan"))


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"rows": (1, 7)}, "row 7 is unknown"),
            ({"rows": (1, 0)}, "row 0 is unknown"),
            ({"rows": (1, -1)}, "row -1 is unknown"),
            ({"released_rows": (1,)}, "row 1 is unknown"),
            ({"rows": (3, 3)}, "two spans"),
            ({"released_rows": (7,)}, "released row 7 is not held"),
            ({"released_rows": (1, 1)}, "released row 1 is not held"),
            ({"admissions": (admit(3),)}, "row 3 is held by another"),
            ({"admissions": (admit(-1),)}, "row -1"),
            ({"admissions": (admit(1 << 30),)}, "row 1073741824"),
            ({"admissions": (admit(2, 1, BELOW_ZERO),)}, "row 2: stop_token_ids"),
            ({"admissions": (admit(2, 1, NOT_A_NUMBER),)}, "row 2: temperature"),
            (
                {"n_new_blocks": (0, 16), "new_block_ids": range(16)},
                "row 3 has 1[78] blocks; the longest",
            ),
            ({"start_positions": (0, 6)}, "row 1 .* not continue .* starts 0, stored 1"),
            ({"start_positions": (1, 7)}, "row 3 .* not continue .* starts 7, stored 6"),
            ({"n_tokens": (0, 4)}, "row 1 .* without tokens"),
            ({"n_tokens": (1, 2)}, "token_ids has 4 entries where n_tokens adds up to 3"),
            ({"sample": (True,)}, "sample has 1 entries for 2 spans"),
            ({"n_new_blocks": (0, 0)}, "new_block_ids has 1 entries"),
            ({"n_new_blocks": (0, 0), "new_block_ids": ()}, "row 3 has too few blocks"),
            ({"n_new_blocks": (1, 0)}, "row 3 has too few blocks"),
            ({"new_block_ids": (40,)}, r"new_block_ids \[40\]"),
            ({"new_block_ids": (-1,)}, r"new_block_ids \[-1\]"),
            ({"token_ids": (21, 16, 100, 18)}, r"token_ids \[100\]"),
            ({"rows": (), "start_positions": ()}, "without spans"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_broken_plans_say_what_is_wrong(self, changes: dict[str, Any], message: str) -> None:
        table = make_table()
        build(FIRST, table)
        with pytest.raises(PlanError, match=message):
            build(replace(SECOND, **changes), table)

    def test_sequences_longer_than_the_model_allows(self) -> None:
        n = 65
        plan = make_plan(
            admissions=(admit(0, n),),
            rows=(0,),
            start_positions=(0,),
            n_tokens=(n,),
            sample=(True,),
            n_new_blocks=(17,),
            token_ids=(0,) * n,
            new_block_ids=range(17),
        )
        with pytest.raises(PlanError, match="row 0 grows longer"):
            build(plan, make_table())
