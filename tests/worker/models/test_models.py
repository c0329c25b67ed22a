"""Model families against `transformers`, and what is refused before a weight is read."""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from services.worker.models import (
    CheckpointError,
    UnsupportedModel,
    checkpoint_digest,
    layer_range,
    random_stage,
    weights_digest,
)
from services.worker.models.checkpoint import load_stage
from services.worker.models.config_file import read_config
from services.worker.models.config_json import parse_config
from services.worker.models.families.llama import LlamaConfig
from services.worker.models.rotary_config import RopeConfig
from tests.checkpoints import SMALL, Oracle, edit_config, write_checkpoint
from tests.worker.pipeline import Pipeline, Span, load

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 6},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "head-dim": {"head_dim": 10, "num_attention_heads": 4},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "rope-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "rope-linear": {"rope_parameters": LINEAR},
    "rope-llama3": {"rope_parameters": LLAMA3},
    "rope-yarn": {"rope_parameters": YARN},
    "sharded": {"max_shard_size": "20KB"},
}

OLD_SPELLINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 100.0},
    "default-null": {"rope_theta": 100.0, "rope_scaling": None},
    "linear-type": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama3": {
        "rope_theta": 10_000.0,
        "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
    },
    "yarn-type": {
        "rope_theta": 500.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
        },
    },
    "both": {"rope_scaling": LINEAR, "rope_parameters": LINEAR},
}


class TestAgainstTransformers:
    @pytest.mark.parametrize(
        "n_stages", [2, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 3))]
    )
    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
    def test_mixed_batches_have_the_oracles_logits_and_tokens(
        self, tmp_path: Path, shape: dict[str, Any], n_stages: int
    ) -> None:
        write_checkpoint(tmp_path, **shape)
        pipeline = Pipeline(tmp_path, n_stages=n_stages)
        compare_random_schedule(pipeline, Oracle(tmp_path), seed=n_stages)

    @pytest.mark.parametrize("spelling", OLD_SPELLINGS.values(), ids=OLD_SPELLINGS.keys())
    def test_old_rope_spelling_means_what_the_oracle_reads(
        self, tmp_path: Path, spelling: dict[str, Any]
    ) -> None:
        write_checkpoint(tmp_path)
        edit_config(tmp_path, remove=("rope_parameters",), **spelling)
        compare_random_schedule(Pipeline(tmp_path), Oracle(tmp_path), seed=2)

    def test_positions_up_to_the_last_agree(self, tmp_path: Path) -> None:
        write_checkpoint(
            tmp_path, max_position_embeddings=1500, rope_parameters=LLAMA3, num_hidden_layers=1
        )
        tokens = random.Random(1).choices(range(SMALL["vocab_size"]), k=1500)
        pipeline = Pipeline(tmp_path, n_kv_blocks=100, block_size=16)
        pipeline.admit(0, len(tokens))
        pipeline.run([Span(0, tokens[:1490], sample=False)])
        _, logits = pipeline.run([Span(0, tokens[1490:])])
        torch.testing.assert_close(logits, Oracle(tmp_path).logits(tokens)[-1:], rtol=0, atol=1e-4)

    @pytest.mark.parametrize("n_before", [0, 900])
    def test_bfloat16_is_as_close_to_exact_as_the_oracle_is(
        self, tmp_path: Path, n_before: int
    ) -> None:
        write_checkpoint(tmp_path, dtype=torch.bfloat16, max_position_embeddings=1024)
        tokens = random.Random(3).choices(range(SMALL["vocab_size"]), k=n_before + 40)
        exact = Oracle(tmp_path, torch.float32).logits(tokens)[n_before:]
        oracles = Oracle(tmp_path, torch.bfloat16).logits(tokens)[n_before:]
        # "auto" takes the checkpoint's bfloat16.
        pipeline = Pipeline(tmp_path, n_kv_blocks=64, block_size=16)
        pipeline.admit(0, len(tokens))
        if n_before:
            pipeline.run([Span(0, tokens[:n_before], sample=False)])
        ours = torch.cat([pipeline.run([Span(0, [token])])[1] for token in tokens[n_before:]])
        assert 0 < rms(ours - exact) < 1.25 * rms(oracles - exact)


def compare_random_schedule(pipeline: Pipeline, oracle: Oracle, *, seed: int) -> None:
    """Runs prompts, chunks and decodes of five requests mixed at random, then asks the oracle."""
    rng = random.Random(seed)
    vocab = range(SMALL["vocab_size"])
    prompts = [rng.choices(vocab, k=n) for n in (1, 5, 9, 17, 30)]
    tokens = [list(prompt) for prompt in prompts]
    n_done = [0] * len(prompts)
    ours: list[list[tuple[int, int, torch.Tensor]]] = [[] for _ in prompts]  # position, token
    kinds = set()
    for iteration in range(14):
        rows = [row for row in range(len(prompts)) if rng.random() < 0.7] or [iteration % 5]
        rng.shuffle(rows)
        spans = []
        for row in rows:
            n_left = len(tokens[row]) - n_done[row]
            if n_done[row] == 0:
                pipeline.admit(row, len(prompts[row]))
            n = n_left if rng.random() < 0.5 else rng.randint(1, n_left)
            spans.append(Span(row, tokens[row][n_done[row] : n_done[row] + n]))
            kinds.add((n > 1, n_done[row] > 0))
            n_done[row] += n
        sampled, logits = pipeline.run(spans)
        for row, token, row_logits in zip(rows, sampled, logits, strict=True):
            ours[row].append((n_done[row], token, row_logits))
            if n_done[row] == len(tokens[row]):
                tokens[row].append(token)
    assert kinds == {(True, False), (True, True), (False, False), (False, True)}
    for row in range(len(prompts)):
        assert len(tokens[row]) > len(prompts[row]) + 1
        expected = oracle.logits(tokens[row])
        for position, token, row_logits in ours[row]:
            # The oracle's own are up to 6e-5 from what they are in float64.
            torch.testing.assert_close(row_logits, expected[position - 1], rtol=0, atol=2e-4)
            assert token == expected[position - 1].argmax()


def rms(x: torch.Tensor) -> float:
    return float(x.pow(2).mean().sqrt())


class TestLoading:
    def test_each_stage_reads_only_its_own_tensors(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        stored = load_file(tmp_path / "model.safetensors")
        sizes = [read_bytes(tmp_path, stage_index=i, n_stages=3, n_layers=1) for i in range(3)]
        layers = [
            sum(t.nbytes for name, t in stored.items() if name.startswith(f"model.layers.{i}."))
            for i in range(3)
        ]
        embedding = stored["model.embed_tokens.weight"].nbytes
        head = stored["lm_head.weight"].nbytes + stored["model.norm.weight"].nbytes
        assert sizes == [layers[0] + embedding, layers[1], layers[2] + head]

    def test_a_tied_last_stage_reads_the_embedding_too(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path, tie_word_embeddings=True)
        stored = load_file(tmp_path / "model.safetensors")
        total = sum(tensor.nbytes for tensor in stored.values())
        embedding = stored["model.embed_tokens.weight"].nbytes
        alone = read_bytes(tmp_path, stage_index=0, n_stages=1, n_layers=3)
        first = read_bytes(tmp_path, stage_index=0, n_stages=2, n_layers=2)
        last = read_bytes(tmp_path, stage_index=1, n_stages=2, n_layers=1)
        assert alone == total
        assert first + last == total + embedding

    def test_files_that_hold_none_of_a_stages_tensors_need_not_be_there(
        self, tmp_path: Path
    ) -> None:
        write_checkpoint(tmp_path, max_shard_size="20KB")
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        middle = {file for name, file in index["weight_map"].items() if ".layers.1." in name}
        others = set(index["weight_map"].values()) - middle
        assert others
        for file in others:
            (tmp_path / file).unlink()
        assert load(tmp_path, stage_index=1, n_stages=3).n_layers == 1
        with pytest.raises(CheckpointError, match=r"model-.*safetensors cannot be read"):
            load(tmp_path, stage_index=0, n_stages=3)

    def test_missing_tensors_are_named(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        change_weights(tmp_path, {"model.layers.2.mlp.up_proj.weight": None})
        with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
            load(tmp_path)
        load(tmp_path, stage_index=0, n_stages=3)  # not this stage's

    def test_tensors_of_another_shape_are_named_with_both_shapes(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        change_weights(tmp_path, {"model.norm.weight": torch.zeros(47)})
        with pytest.raises(
            CheckpointError, match=r"model\.norm\.weight has shape \[47\], not \[48"
        ):
            load(tmp_path)

    def test_tensors_of_unknown_element_types_are_named(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        quantised = torch.zeros(199, 48, dtype=torch.int8)
        change_weights(tmp_path, {"lm_head.weight": quantised})
        with pytest.raises(CheckpointError, match=r"lm_head\.weight has element type I8"):
            load(tmp_path)

    def test_a_directory_without_weights_is_named(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
            load(tmp_path)

    @pytest.mark.parametrize(
        ("stored", "wanted", "expected"),
        [
            (torch.float32, "auto", torch.float32),
            (torch.bfloat16, "auto", torch.bfloat16),
            (torch.float16, "auto", torch.float32),
            (torch.float32, "bfloat16", torch.bfloat16),
            (torch.bfloat16, "float32", torch.float32),
        ],
        ids=lambda value: str(value).removeprefix("torch."),
    )
    def test_dtype(
        self, tmp_path: Path, stored: torch.dtype, wanted: str, expected: torch.dtype
    ) -> None:
        write_checkpoint(tmp_path, dtype=stored)
        stage = load(tmp_path, dtype=wanted)
        assert stage.dtype == expected
        hidden = torch.ones(1, stage.hidden_size, dtype=expected)
        assert stage.logits(hidden).dtype == expected

    def test_weights_do_not_change_with_the_file(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        pipeline = Pipeline(tmp_path)
        before, after = (0, 1)
        for row in (before, after):
            pipeline.admit(row, 5)
        prompt = list(range(5))
        expected = pipeline.run([Span(before, prompt)])
        path = tmp_path / "model.safetensors"
        size = path.stat().st_size
        with path.open("r+b") as file:  # written over in place, as by a careless download
            file.write(bytes(size))
        tokens, logits = pipeline.run([Span(after, prompt)])
        assert tokens == expected[0]
        assert torch.equal(logits, expected[1])
        assert logits.any()

    def test_unknown_dtype_is_refused(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        with pytest.raises(UnsupportedModel, match="'int8'"):
            load(tmp_path, dtype="int8")

    @pytest.mark.parametrize("tp_rank", [-1, 2])
    def test_a_rank_outside_its_stage_is_refused(self, tmp_path: Path, tp_rank: int) -> None:
        write_checkpoint(tmp_path)
        with pytest.raises(UnsupportedModel, match=f"tp_rank {tp_rank}"):
            load(tmp_path, tp_rank=tp_rank, tp_size=2)

    def test_another_architecture_is_refused_by_name(self, tmp_path: Path) -> None:
        edit_config(write_checkpoint(tmp_path), architectures=["MambaForCausalLM"])
        with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
            load(tmp_path)


def read_bytes(directory: Path, *, stage_index: int, n_stages: int, n_layers: int) -> int:
    """Returns what a stage says it has read, having checked that it says so step by step."""
    progress: list[tuple[int, int]] = []
    stage = load_stage(
        directory,
        stage_index=stage_index,
        n_stages=n_stages,
        tp_rank=0,
        tp_size=1,
        dtype="auto",
        device=torch.device("cpu"),
        on_progress=lambda *step: progress.append(step),
    )
    assert stage.n_layers == n_layers
    done = [step[0] for step in progress]
    assert done[0] == 0
    assert done == sorted(set(done))
    assert {step[1] for step in progress} == {done[-1]}
    return done[-1]


def change_weights(directory: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """Rewrites a checkpoint's one file; None takes a tensor out."""
    path = directory / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


class TestLayerRange:
    @pytest.mark.parametrize(
        ("n_layers", "n_stages", "sizes"),
        [(4, 1, [4]), (4, 2, [2, 2]), (7, 3, [3, 2, 2]), (8, 3, [3, 3, 2]), (3, 3, [1, 1, 1])],
    )
    def test_is_balanced_and_leaves_the_rest_to_earlier_stages(
        self, n_layers: int, n_stages: int, sizes: list[int]
    ) -> None:
        ranges = [layer_range(n_layers, i, n_stages) for i in range(n_stages)]
        assert [len(layers) for layers in ranges] == sizes
        assert [layer for layers in ranges for layer in layers] == list(range(n_layers))

    def test_refuses_more_stages_than_layers(self) -> None:
        with pytest.raises(UnsupportedModel, match=r"3 layers .* 4 stages"):
            layer_range(3, 0, 4)

    @pytest.mark.parametrize("stage_index", [-1, 2])
    def test_refuses_a_stage_outside_the_pipeline(self, stage_index: int) -> None:
        with pytest.raises(UnsupportedModel, match=f"stage_index {stage_index}"):
            layer_range(8, stage_index, 2)


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def config_with(**changes: Any) -> LlamaConfig:
    config = parse_config({**CONFIG, **changes}, {})
    assert isinstance(config, LlamaConfig)
    return config


class TestModelConfig:
    def test_fills_in_what_old_files_leave_out(self) -> None:
        config = config_with()
        assert (config.n_kv_heads, config.head_dim) == (4, 16)
        assert (config.rope.rope_type, config.rope.rope_theta) == ("default", 10_000.0)
        assert (config.tie_word_embeddings, config.eos_token_ids) == (False, (2,))
        assert config.checkpoint_dtype == "float32"

    def test_is_the_same_made_in_code(self) -> None:
        assert config_with(rope_theta=500_000, rms_norm_eps=1) == LlamaConfig(
            vocab_size=100,
            hidden_size=64,
            intermediate_size=128,
            n_layers=2,
            n_heads=4,
            n_kv_heads=4,
            head_dim=16,
            max_position_embeddings=512,
            rms_norm_eps=1.0,
            eos_token_ids=(2,),
            rope=RopeConfig(rope_theta=500_000.0),
        )

    def test_that_does_not_fit_together_makes_no_stage(self) -> None:
        config = replace(config_with(), n_kv_heads=3)
        with pytest.raises(ValueError, match="num_key_value_heads"):
            random_stage(config, dtype=torch.float32, device=torch.device("cpu"))

    @pytest.mark.parametrize(
        "both",
        [
            {"rope_parameters": LINEAR, "rope_scaling": {"type": "linear", "factor": 3}},
            {"rope_parameters": {**LINEAR, "factor": None}, "rope_scaling": LINEAR},
            {"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": LINEAR},
            {"rope_parameters": {**LINEAR, "type": "linear"}, "rope_scaling": None},
        ],
    )
    def test_rotary_settings_of_two_keys_may_complete_each_other(
        self, both: dict[str, Any]
    ) -> None:
        assert config_with(**both) == config_with(rope_parameters=LINEAR)

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"hidden_act": "gelu"}, "gelu"),
            ({"rope_scaling": {"type": "axial", "factor": 2.0}}, "axial"),
            ({"rope_parameters": {"full_attention": {}, "sliding": {}}}, "full_attention"),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
            ({"rope_scaling": {"type": "linear"}}, "factor"),
            ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscales": 1.0}}, "mscales"),
            ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
            ({"rope_scaling": LINEAR, "rope_parameters": YARN}, "contradict .*: factor"),
            ({"rope_scaling": LINEAR, "rope_parameters": {"type": "yarn"}}, "contradict .*type"),
            ({"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "rope_theta": 7.0}}, "500.0"),
            ({"bos_token_id": 1e-6}, "bos_token_id 1e-06 is no token"),
            ({"eos_token_id": [2, 1e-6]}, "eos_token_id .* is no token"),
            ({"pad_token_id": "0"}, "pad_token_id '0' is no token"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
            ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
            ({"sliding_window": 4096}, "sliding_window"),
            ({"quantization_config": {"bits": 4}}, "quantization_config"),
            ({"rope_interleaved": True}, "rope_interleaved"),
            ({"num_key_value_heads": 3}, "num_key_value_heads"),
            ({"num_attention_heads": 3, "num_key_value_heads": 1}, "hidden_size"),
            ({"head_dim": 15}, "head_dim"),
            ({"hidden_size": None}, "hidden_size"),
            ({"num_hidden_layers": 0}, "num_hidden_layers"),
            ({"vocab_size": "many"}, "vocab_size"),
            ({"torch_dtype": "float8_e4m3fn"}, "checkpoint_dtype"),
            ({"architectures": []}, "architectures"),
            ({"architectures": None}, "architectures"),
            ({"architectures": None, "model_type": "t5"}, "architectures"),
            ({"architectures": ["LlamaForCausalLM", "B"], "model_type": "llama"}, "no single one"),
            ({"is_causal": False}, "is_causal"),
            ({"is_causal": None}, "is_causal"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_refuses_what_is_not_supported_by_name(
        self, changes: dict[str, Any], named: str
    ) -> None:
        config_with()
        with pytest.raises(UnsupportedModel, match=named):
            config_with(**changes)

    @pytest.mark.parametrize(
        "changes",
        [
            {"rope_interleaved": False},
            {"sliding_window": None},
            {"use_cache": True, "bos_token_id": 1, "initializer_range": 0.02},
            {"_name_or_path": "somewhere"},
            {"partial_rotary_factor": 1.0},
            {"auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}},
            {"is_causal": True},
            {"model_type": "llama", "architectures": None},
            {"model_type": "llama", "architectures": ["MistralForCausalLM"]},
            {"model_type": "a_family_that_no_other_program_knows"},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_options_that_change_nothing_are_accepted(self, changes: dict[str, Any]) -> None:
        assert config_with(**changes) == config_with()

    @pytest.mark.parametrize(
        ("config_eos", "generation_eos", "expected"),
        [
            (2, None, (2,)),
            ([2, 3], None, (2, 3)),
            (2, 5, (5,)),
            (2, [5, 0], (5, 0)),
            (None, None, ()),
        ],
    )
    def test_eos_of_the_generation_config_comes_first(
        self, config_eos: Any, generation_eos: Any, expected: tuple[int, ...]
    ) -> None:
        generation = {} if generation_eos is None else {"eos_token_id": generation_eos}
        config = parse_config({**CONFIG, "eos_token_id": config_eos}, generation)
        assert config.eos_token_ids == expected

    def test_reads_both_files_of_a_directory(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 2}))
        assert read_config(tmp_path).eos_token_ids == (2,)
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
        assert read_config(tmp_path).eos_token_ids == (7, 8)

    @pytest.mark.parametrize("contents", [None, "{", "[]"], ids=["missing", "broken", "list"])
    def test_a_directory_without_a_config_is_refused(
        self, tmp_path: Path, contents: str | None
    ) -> None:
        if contents is not None:
            (tmp_path / "config.json").write_text(contents)
        with pytest.raises(UnsupportedModel, match=r"config\.json"):
            read_config(tmp_path)


class TestFingerprint:
    def test_does_not_depend_on_the_spelling(self) -> None:
        old = config_with(
            rope_theta=500.0, rope_scaling={"type": "linear", "factor": 3.0}, torch_dtype="float16"
        )
        new = config_with(
            rope_parameters=LINEAR, num_key_value_heads=4, head_dim=16, use_cache=False
        )
        assert old.fingerprint() == new.fingerprint()
        assert len(old.fingerprint()) == 64

    @pytest.mark.parametrize(
        "changes",
        [
            {"num_hidden_layers": 3},
            {"rms_norm_eps": 1e-6},
            {"rope_theta": 5000.0},
            {"rope_scaling": {"type": "linear", "factor": 3.0}},
            {"tie_word_embeddings": True},
            {"eos_token_id": 4},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_changes_with_what_is_computed(self, changes: dict[str, Any]) -> None:
        changed, plain = config_with(**changes), config_with()
        assert changed.fingerprint() != plain.fingerprint()


def test_the_digest_tells_checkpoints_of_the_same_shape_apart(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "first", seed=1)
    again = write_checkpoint(tmp_path / "again", seed=1)
    other = write_checkpoint(tmp_path / "other", seed=2)
    assert checkpoint_digest(first) == checkpoint_digest(again) != checkpoint_digest(other)
    (other / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        checkpoint_digest(other)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose file of weights may be changed and is put right again."""
    return write_checkpoint(tmp_path_factory.mktemp("weights"))


@given(st.data())
def test_the_digest_of_weights_tells_one_changed_bit(weights: Path, data: st.DataObject) -> None:
    file = weights / "model.safetensors"
    right, digest = file.read_bytes(), weights_digest(weights)
    at = data.draw(st.integers(0, len(right) - 1))
    wrong = bytearray(right)
    wrong[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        file.write_bytes(wrong)
        assert weights_digest(weights) != digest
    finally:
        file.write_bytes(right)
    assert weights_digest(weights) == digest
