"""Layers divided among ranks against whole ones, and what each rank reads of a checkpoint."""

import math
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GlmConfig, Olmo2Config, Phi3Config, PreTrainedConfig

from kernels.native.linear import NativeGatedWeight, NativeWeight
from kernels.program import Program
from kernels.pytorch.linear import OneDnnWeight
from kernels.steps import Buffer
from kernels.weights.gated_in_two import GatedMatrix
from services.worker.engine.kv_cache import KVCache, kv_block_bytes
from services.worker.engine.model_runner import ModelRunner
from services.worker.models import UnsupportedModel, directory_files, weights
from services.worker.models.checkpoint_tensors import CheckpointTensors
from services.worker.models.config import ModelConfig
from services.worker.models.config_json import parse_config
from services.worker.models.directory_files import DirectoryFiles
from services.worker.models.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    read_gated,
)
from services.worker.models.tensor_files import CheckpointError
from services.worker.models.tensor_parallel import HeadShare, vocab_share
from services.worker.models.weights import Part, Shard, TensorSource, WantedTensors
from services.worker.rank.data_plane.rendezvous import join
from services.worker.rank.data_plane.transport import RankPlace
from tests.checkpoints import SMALL, Oracle, write_checkpoint, write_family_checkpoint
from tests.worker.engine.test_model_runner import prompt_plan
from tests.worker.models.test_models import compare_random_schedule
from tests.worker.pipeline import Pipeline, RankGroup, Span, ThreadRank, load
from tests.worker.programs import computed, embedded
from tests.worker.rank.data_plane.test_transport import HOST, rendezvous

CPU = torch.device("cpu")
EIGHT_HEADS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # of 6 elements each

# (stages, ranks of each, shape)
CUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "1x2": (1, 2, {}),
    "2x2": (2, 2, {}),
    "2x2-tied": (2, 2, {"tie_word_embeddings": True}),
    "1x2-tied": (1, 2, {"tie_word_embeddings": True}),
    "1x2-biases": (1, 2, {"attention_bias": True, "mlp_bias": True}),
    "1x2-mqa": (1, 2, {"num_key_value_heads": 1}),
    "1x3-mha": (1, 3, {"num_key_value_heads": 6}),
    "1x4-replicated": (1, 4, EIGHT_HEADS),
    "2x4-replicated-tied": (2, 4, {**EIGHT_HEADS, "tie_word_embeddings": True}),
    "1x4-head-dim": (1, 4, {**EIGHT_HEADS, "head_dim": 10}),
}

REPLICATED: dict[str, PreTrainedConfig] = {
    "fused": Phi3Config(**{**SMALL, **EIGHT_HEADS, "pad_token_id": None}),
    "neighbours-with-biases": GlmConfig(
        **{**SMALL, **EIGHT_HEADS, "pad_token_id": None}, head_dim=8
    ),
    "norms-over-all-heads": Olmo2Config(**{**SMALL, **EIGHT_HEADS}),
}


class MemoryTensors(TensorSource):
    """A source over tensors in memory."""

    def __init__(self, tensors: dict[str, Tensor], tp_rank: int, tp_size: int) -> None:
        super().__init__(tp_rank, tp_size)
        self._tensors = tensors

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)

    def _read(self, part: Part, out: Tensor) -> None:
        whole = self._tensors[part.name]
        assert whole.shape == part.shape
        out.copy_(whole[tuple(slice(span.start, span.stop) for span in part.spans)])


class TestAgainstTransformers:
    @pytest.mark.parametrize(("n_stages", "tp_size", "shape"), CUTS.values(), ids=CUTS.keys())
    def test_mixed_batches_have_the_oracles_logits_and_tokens(
        self, tmp_path: Path, n_stages: int, tp_size: int, shape: dict[str, Any]
    ) -> None:
        write_checkpoint(tmp_path, **shape)
        pipeline = Pipeline(tmp_path, n_stages=n_stages, tp_size=tp_size)
        compare_random_schedule(pipeline, Oracle(tmp_path), seed=n_stages)

    @pytest.mark.parametrize("config", REPLICATED.values(), ids=REPLICATED.keys())
    def test_ranks_that_share_a_head_of_keys_have_it_from_any_matrix(
        self, tmp_path: Path, config: PreTrainedConfig
    ) -> None:
        write_family_checkpoint(tmp_path, config)
        compare_random_schedule(Pipeline(tmp_path, tp_size=4), Oracle(tmp_path), seed=3)

    def test_bfloat16_ranks_are_close_to_one_rank(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path, dtype=torch.bfloat16)
        tokens = random.Random(3).choices(range(SMALL["vocab_size"]), k=40)
        results = []
        for tp_size in (1, 2):
            pipeline = Pipeline(tmp_path, tp_size=tp_size)
            pipeline.admit(0, len(tokens))
            results.append(pipeline.run([Span(0, tokens)])[1])
        exact = Oracle(tmp_path, torch.float32).logits(tokens)[-1:]
        one, two = ((result - exact).norm() for result in results)
        assert 0 < two < 2 * one


@pytest.mark.parametrize("sample", [(True, False), (False, False)], ids=["sampled", "nothing"])
def test_ranks_that_meet_over_gloo_agree_with_the_oracle(
    tmp_path: Path, sample: tuple[bool, bool]
) -> None:
    write_checkpoint(tmp_path)
    group = RankGroup(2)
    plan = prompt_plan(sample=sample)

    def work(rank: ThreadRank, address: str) -> Tensor:
        peers = join(
            RankPlace("p", 1, 0, 1, rank.rank, 2),
            rendezvous_address=address,
            data_host=HOST,
            device=CPU,
            timeout_s=5,
        )
        model = load(tmp_path, tp_rank=rank.rank, tp_size=2)
        ranks = peers.tensor_parallel
        runner = ModelRunner(model, n_kv_blocks=8, block_size=4, tensor_parallel=ranks)
        batch = runner.prepare(plan)
        logits = runner.logits(batch, None).values
        peers.close()
        return logits

    with rendezvous() as address:
        results = group.run(lambda rank: work(rank, address))
    expected = Oracle(tmp_path).logits(list(plan.token_ids[:3]))[-1:] if any(sample) else None
    for logits in results:
        assert logits.shape == (sum(sample), SMALL["vocab_size"])
        if expected is not None:
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


class TestLayers:
    @pytest.mark.parametrize("is_transposed", [False, True], ids=["plain", "transposed"])
    @pytest.mark.parametrize("tp_size", [1, 2, 3])
    def test_columns_then_rows_are_two_whole_layers(
        self, tp_size: int, is_transposed: bool
    ) -> None:
        n_in, inner = 7, 12
        up, down = torch.randn(inner, n_in), torch.randn(n_in, inner)
        tensors = {
            "up.weight": up.t() if is_transposed else up,
            "up.bias": torch.randn(inner),
            "down.weight": down.t() if is_transposed else down,
            "down.bias": torch.randn(n_in),
        }
        x = torch.randn(5, n_in)

        def work(rank: ThreadRank) -> Tensor:
            source = MemoryTensors(tensors, rank.rank, rank.size)
            first = ColumnParallelLinear.read(
                source, ["up"], n_in=n_in, n_out=[inner], has_bias=True, is_transposed=is_transposed
            )
            second = RowParallelLinear.read(
                source, "down", n_in=inner, n_out=n_in, has_bias=True, is_transposed=is_transposed
            )
            assert first.weight.shape == (inner // tp_size, n_in)
            return computed(lambda to, x: second.describe(to, first.describe(to, x)), x, ranks=rank)

        expected = F.linear(F.linear(x, up, tensors["up.bias"]), down, tensors["down.bias"])
        for result in RankGroup(tp_size).run(work):
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)

    def test_fused_parts_are_divided_each_on_its_own(self) -> None:
        tensors = {"gate.weight": torch.randn(6, 5), "up.weight": torch.randn(4, 5)}
        x = torch.randn(3, 5)
        for rank in range(2):
            layer = ColumnParallelLinear.read(
                MemoryTensors(tensors, rank, 2),
                ["gate", "up"],
                n_in=5,
                n_out=(6, 4),
                has_bias=False,
            )
            gate = F.linear(x, tensors["gate.weight"])[:, 3 * rank : 3 * rank + 3]
            up = F.linear(x, tensors["up.weight"])[:, 2 * rank : 2 * rank + 2]
            torch.testing.assert_close(computed(layer.describe, x), torch.cat((gate, up), 1))

    @pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "biases"])
    @pytest.mark.parametrize("tp_size", [1, 2, 3])
    def test_a_gate_and_what_it_gates_may_be_one_matrix(self, tp_size: int, has_bias: bool) -> None:
        both, bias = torch.randn(12, 5), torch.randn(12)
        tensors = {"both.weight": both, "both.bias": bias}
        tensors |= {"gate.weight": both[:6], "gate.bias": bias[:6]}
        tensors |= {"up.weight": both[6:], "up.bias": bias[6:]}
        x = torch.randn(3, 5)
        gate, up = F.linear(x, both, bias if has_bias else None).chunk(2, -1)
        expected = (F.silu(gate) * up).chunk(tp_size, -1)
        for rank in range(tp_size):
            for names in (["both"], ["gate", "up"]):
                layer = read_gated(
                    MemoryTensors(tensors, rank, tp_size),
                    names,
                    n_in=5,
                    size=6,
                    gate="silu",
                    has_bias=has_bias,
                )
                torch.testing.assert_close(computed(partial(_gated, layer), x), expected[rank])

    @pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
    @pytest.mark.parametrize("vocab_size", [1, 5, 7, 8, 199])
    @pytest.mark.parametrize("is_tied", [False, True], ids=["plain", "tied"])
    def test_a_vocabulary_of_any_size_is_embedded_and_scored(
        self, vocab_size: int, tp_size: int, is_tied: bool
    ) -> None:
        table = torch.randn(vocab_size, 6)
        token_ids = torch.tensor([vocab_size - 1, 0, 3, 3, 2, vocab_size // 2]) % vocab_size
        hidden = torch.randn(3, 6)

        def work(rank: ThreadRank) -> tuple[Tensor, Tensor]:
            source = MemoryTensors({"table": table}, rank.rank, rank.size)
            embedding = VocabParallelEmbedding.read(
                source, "table", vocab_size=vocab_size, hidden_size=6, is_tied=is_tied
            )
            head = VocabParallelHead.tied(embedding)
            return (
                embedded(embedding.describe, token_ids, ranks=rank),
                computed(head.describe, hidden, ranks=rank),
            )

        for rows, logits in RankGroup(tp_size).run(work):
            assert torch.equal(rows, table[token_ids])
            torch.testing.assert_close(logits, hidden @ table.t())


def _gated(matrix: GatedMatrix, to: Program, x: Buffer) -> Buffer:
    return to.gated(matrix, x)


class TestShares:
    @pytest.mark.parametrize("vocab_size", [1, 5, 8, 199])
    @pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
    def test_vocabulary_is_cut_without_gap_or_overlap(self, vocab_size: int, tp_size: int) -> None:
        shares = [vocab_share(vocab_size, rank, tp_size) for rank in range(tp_size)]
        assert [token for share in shares for token in share] == list(range(vocab_size))

    @pytest.mark.parametrize(
        ("n_heads", "n_kv_heads", "tp_size"),
        [(8, 8, 4), (8, 4, 2), (8, 2, 2), (8, 2, 4), (8, 2, 8), (8, 1, 4), (12, 2, 4), (6, 3, 6)],
    )
    def test_every_rank_has_the_kv_heads_of_its_query_heads(
        self, n_heads: int, n_kv_heads: int, tp_size: int
    ) -> None:
        config = config_with(num_attention_heads=n_heads, num_key_value_heads=n_kv_heads)
        for rank in range(tp_size):
            share = HeadShare.of(config, rank, tp_size)
            group_size = len(share.q) // len(share.kv)
            used = [share.kv[i // group_size] for i in range(len(share.q))]
            assert used == [head // (n_heads // n_kv_heads) for head in share.q]

    @pytest.mark.parametrize(
        ("shape", "tp_size", "named"),
        [
            ({}, 4, "num_attention_heads: 6 .* tp_size 4"),
            ({}, 3, "num_key_value_heads: 2 .* tp_size 3"),
            ({"num_key_value_heads": 3}, 2, "num_key_value_heads: 3 .* tp_size 2"),
            ({"intermediate_size": 71}, 2, r"gate_proj: 71 .* tp_size 2"),
        ],
        ids=["heads", "kv-heads-replicated", "kv-heads", "mlp"],
    )
    def test_what_cannot_be_divided_is_refused_by_name(
        self, tmp_path: Path, shape: dict[str, Any], tp_size: int, named: str
    ) -> None:
        write_checkpoint(tmp_path, **shape)
        (tmp_path / "model.safetensors").unlink()  # before any file is looked at
        with pytest.raises(UnsupportedModel, match=named):
            load(tmp_path, tp_size=tp_size)


def config_with(**changes: Any) -> ModelConfig:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        **SMALL,
        "head_dim": 10,
        **changes,
    }
    del config["initializer_range"]
    return parse_config(config, {})


class TestKVCache:
    @pytest.mark.parametrize(("tp_size", "n_kv_heads"), [(1, 2), (2, 1), (4, 1), (8, 1)])
    def test_has_the_heads_of_one_rank(self, tp_size: int, n_kv_heads: int) -> None:
        config = config_with(num_attention_heads=8)
        cache = KVCache(
            config,
            range(3),
            n_blocks=7,
            block_size=4,
            dtype=torch.bfloat16,
            device=CPU,
            tp_size=tp_size,
        )
        assert {tensor.shape for layer in cache.layers for tensor in layer} == {
            (7, 4, n_kv_heads, 10)
        }
        allocated = sum(tensor.nbytes for layer in cache.layers for tensor in layer)
        assert allocated == 7 * kv_block_bytes(
            config, range(3), block_size=4, dtype=torch.bfloat16, tp_size=tp_size
        )


def test_a_runner_refuses_weights_of_another_rank(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path), tp_rank=1, tp_size=2)
    with pytest.raises(ValueError, match=r"rank 1 of 2 .* rank 0 of 1"):
        ModelRunner(model, n_kv_blocks=8, block_size=4)


class TestReading:
    @pytest.mark.parametrize("tp_size", [2, 4])
    def test_each_rank_reads_the_bytes_of_its_share(self, tmp_path: Path, tp_size: int) -> None:
        write_checkpoint(tmp_path, **EIGHT_HEADS)
        stored = load_file(tmp_path / "model.safetensors")
        for rank in range(tp_size):
            expected = sum(
                share_of(name, tensor, rank, tp_size).nbytes for name, tensor in stored.items()
            )
            assert read_bytes(tmp_path, tp_rank=rank, tp_size=tp_size) == expected

    def test_what_other_ranks_have_is_not_looked_at(self, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path, **EIGHT_HEADS) / "model.safetensors"
        stored = load_file(path)
        for rank in range(4):
            poisoned = {name: torch.full_like(t, torch.nan) for name, t in stored.items()}
            for name, tensor in stored.items():
                share_of(name, poisoned[name], rank, 4).copy_(share_of(name, tensor, rank, 4))
            save_file(poisoned, path)
            held = tensors_of(load(tmp_path, tp_rank=rank, tp_size=4))
            assert len(held) == 2 + 6 * SMALL["num_hidden_layers"] + 1
            assert all(tensor.isfinite().all() for tensor in held)

    @pytest.mark.parametrize(
        "part",
        [
            Part("w", (9, 6)),
            Part("w", (9, 6), Shard(0, range(2, 9))),
            Part("w", (9, 6), Shard(1, range(4, 6))),
            Part("w", (9, 6), Shard(0, range(9, 9))),
            Part("w", (9, 6), Shard(0, range(1, 4)), is_transposed=True),
            Part("w", (9, 6), Shard(1, range(5)), is_transposed=True),
        ],
        ids=str,
    )
    def test_parts_in_pieces_of_any_size(
        self, tmp_path: Path, part: Part, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = torch.randn(9, 6)
        save_file({"w": whole}, tmp_path / "model.safetensors")
        spans = tuple(slice(span.start, span.stop) for span in part.spans)
        expected = whole[spans].t() if part.is_transposed else whole[spans]
        for piece_bytes, mapped_bytes in ((1, 1), (50, 100), (1 << 20, 1 << 20)):
            monkeypatch.setattr(weights, "_PIECE_BYTES", piece_bytes)
            monkeypatch.setattr(directory_files, "_MAX_MAPPED_BYTES", mapped_bytes)
            steps: list[tuple[int, int]] = []
            wanted = WantedTensors(0, 1)
            wanted.joined([part])
            source = CheckpointTensors(
                DirectoryFiles(tmp_path),
                wanted,
                dtype=torch.float32,
                device=CPU,
                on_progress=lambda *step: steps.append(step),  # noqa: B023
            )
            assert torch.equal(source.joined([part]), expected)
            assert steps[-1] == (expected.nbytes, expected.nbytes)

    def test_the_same_tensor_wanted_in_two_shapes_is_refused(self, tmp_path: Path) -> None:
        save_file({"w": torch.zeros(4, 3)}, tmp_path / "model.safetensors")
        wanted = WantedTensors(0, 1)
        wanted.tensor("w", 4, 3)
        wanted.tensor("w", 3, 4)
        with pytest.raises(CheckpointError, match=r"w has shape \[4, 3\], not \[3, 4\]"):
            CheckpointTensors(
                DirectoryFiles(tmp_path),
                wanted,
                dtype=torch.float32,
                device=CPU,
                on_progress=lambda n_done, n_total: None,
            )


class TestRandomWeights:
    @pytest.fixture(name="directory")
    def make_directory(self, tmp_path: Path) -> Path:
        write_checkpoint(tmp_path, **EIGHT_HEADS, attention_bias=True)
        (tmp_path / "model.safetensors").unlink()
        return tmp_path

    def test_need_no_files_and_are_the_same_however_the_model_is_cut(self, directory: Path) -> None:
        tokens = random.Random(1).choices(range(SMALL["vocab_size"]), k=20)
        logits = []
        for n_stages, tp_size in ((1, 1), (2, 2), (1, 4)):
            pipeline = Pipeline(directory, n_stages=n_stages, tp_size=tp_size, load_format="random")
            pipeline.admit(0, len(tokens))
            logits.append(pipeline.run([Span(0, tokens)])[1])
        torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(logits[2], logits[0], rtol=0, atol=1e-5)
        assert logits[0].std() > 0

    def test_progress_counts_what_is_made(self, directory: Path) -> None:
        steps: list[tuple[int, int]] = []
        model = load(
            directory,
            tp_rank=1,
            tp_size=2,
            load_format="random",
            on_progress=lambda *step: steps.append(step),
        )
        n_bytes = 4 * n_elements_of(model)
        assert steps[0] == (0, n_bytes)
        assert steps[-1] == (n_bytes, n_bytes)


def tensors_of(thing: Any) -> list[Tensor]:
    """All weights in a stage's layers, embedding and head, as they are held."""
    return [tensor for tensor, _ in weights_of(thing)]


def n_elements_of(thing: Any) -> int:
    """How many elements these have, without what packing adds."""
    return sum(math.prod(shape) for _, shape in weights_of(thing))


def weights_of(thing: Any) -> list[tuple[Tensor, Sequence[int]]]:
    """All weights as they are held, and their shapes as they were read."""
    found: dict[int, tuple[Tensor, Sequence[int]]] = {}

    def visit(value: Any) -> None:
        if isinstance(value, OneDnnWeight):  # whose tensor is opaque
            found[id(value.weight)] = value.weight.to_dense(), value.shape
        elif isinstance(value, Tensor):
            found[value.data_ptr()] = value, value.shape
        elif isinstance(value, (NativeWeight, NativeGatedWeight)):
            found[value.packed.data_ptr()] = value.packed, value.shape
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif hasattr(value, "__dataclass_fields__"):
            for name in value.__dataclass_fields__:
                visit(getattr(value, name))

    visit(thing.runner.program.steps)
    return list(found.values())


def share_of(name: str, tensor: Tensor, rank: int, tp_size: int) -> Tensor:
    """Returns a rank's part of a tensor of a Llama with EIGHT_HEADS, found in another way."""
    if tensor.dim() == 1:
        return tensor
    if "k_proj" in name or "v_proj" in name:
        head_dim = SMALL["hidden_size"] // 8
        n_heads = max(1, 2 // tp_size)
        first = rank * 2 // tp_size
        return tensor[first * head_dim : (first + n_heads) * head_dim]
    if "o_proj" in name or "down_proj" in name:
        return tensor.chunk(tp_size, 1)[rank]
    return tensor.chunk(tp_size, 0)[rank]  # torch's chunks are of ceil(n / tp_size), as ours


def read_bytes(directory: Path, **place: Any) -> int:
    steps: list[tuple[int, int]] = []
    load(directory, on_progress=lambda *step: steps.append(step), **place)
    assert steps[0] == (0, steps[-1][1])
    assert steps[-1][0] == steps[-1][1]
    return steps[-1][0]
