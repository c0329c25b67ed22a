"""Models with adapters: the oracle is `transformers` with merged weights in float32."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
)

from kernels import TORCH, native_ops
from kernels.forms.adapter_rows import NO_ADAPTER, AdapterRows
from kernels.steps import AddLowRank
from kernels.weights.linear import Quantization
from services.common.pooling import Pooling
from services.worker.models.adapters.adaptable_program import ModulePlaces
from services.worker.models.adapters.adapter import Adapter
from services.worker.models.adapters.adapter_config import AdapterError
from services.worker.models.config_file import read_config
from services.worker.models.registry import build_stage
from tests.adapters import merge, sizes_of, write_adapter
from tests.checkpoints import SMALL, Oracle, write_family_checkpoint
from tests.worker.pipeline import Pipeline, Span, load, needs_int8

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

FAMILIES: dict[str, tuple[PreTrainedConfig, Sequence[str]]] = {
    "llama": (LlamaConfig(**SMALL), (*PROJECTIONS, "lm_head")),
    "fused": (
        Phi3Config(**SMALL, pad_token_id=None),
        ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"),
    ),
    "some modules": (LlamaConfig(**SMALL), ("q_proj", "v_proj", "up_proj")),
    "tied head": (Qwen2Config(**{**SMALL, "tie_word_embeddings": True}), ("lm_head", "k_proj")),
    "four norms": (Gemma2Config(**SMALL, head_dim=16, sliding_window=5), PROJECTIONS),
    "transposed": (
        GPT2Config(vocab_size=199, n_embd=48, n_layer=3, n_head=6, n_positions=256, eos_token_id=2),
        ("c_attn", "c_proj", "c_fc"),
    ),
}

LAYOUTS = [(1, 1), (2, 1), (1, 2)]
PROMPT = [5, 17, 98, 3, 150, 42, 7, 61, 12]


def adapter_of(directory: Path, name: str = "an-adapter") -> Adapter:
    return Adapter(name, directory)


def follow(pipeline: Pipeline, adapter: Adapter | None, n_tokens: int) -> tuple[Tensor, list[int]]:
    """Logits of the prompt's last token and of each decode, and the greedy tokens."""
    pipeline.admit(0, len(PROMPT), adapter="" if adapter is None else adapter.digest)
    (token,), logits = pipeline.run([Span(0, PROMPT)])
    tokens, rows = [token], [logits]
    while len(tokens) < n_tokens:
        (token,), logits = pipeline.run([Span(0, [tokens[-1]])])
        tokens.append(token)
        rows.append(logits)
    pipeline.release(0)
    return torch.cat(rows), tokens


def assert_like_oracle(
    directory: Path, adapter_path: Path, n_tokens: int = 6, **options: Any
) -> None:
    oracle = Oracle(directory)
    base = oracle.logits(PROMPT)[-1]
    merge(oracle.model, adapter_path)
    adapter = adapter_of(adapter_path)
    pipeline = Pipeline(directory, dtype="float32", adapters=[adapter], **options)
    logits, tokens = follow(pipeline, adapter, n_tokens)
    expected = oracle.logits([*PROMPT, *tokens[:-1]])[len(PROMPT) - 1 :]
    scale = expected.abs().max().clamp(min=1)
    assert (logits - expected).abs().max() / scale <= 1e-4
    assert tokens == expected.argmax(-1).tolist()
    assert (expected[0] - base).abs().max() > 0.1  # an adapter that does nothing shows nothing


@pytest.mark.parametrize(("n_stages", "tp_size"), LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "fused"])
def test_logits_are_those_of_the_merged_model(
    tmp_path: Path, family: str, n_stages: int, tp_size: int
) -> None:
    config, targets = FAMILIES[family]
    write_family_checkpoint(tmp_path / "base", config)
    write_adapter(tmp_path / "adapter", Oracle(tmp_path / "base").model, targets)
    assert_like_oracle(tmp_path / "base", tmp_path / "adapter", n_stages=n_stages, tp_size=tp_size)


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [1, 4, 64, 256])
@pytest.mark.parametrize(("n_stages", "tp_size"), LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_kind_are_those_of_the_merged_model(
    tmp_path: Path, family: str, n_stages: int, tp_size: int, rank: int
) -> None:
    config, targets = FAMILIES[family]
    write_family_checkpoint(tmp_path / "base", config)
    model = Oracle(tmp_path / "base").model
    use_rslora = rank == 64
    alpha = 2 * rank ** (1 if use_rslora else 1.5)  # so that the changes of all ranks are as large
    write_adapter(
        tmp_path / "adapter", model, targets, rank=rank, alpha=alpha, use_rslora=use_rslora
    )
    assert_like_oracle(tmp_path / "base", tmp_path / "adapter", n_stages=n_stages, tp_size=tp_size)


@pytest.mark.parametrize("family", ["tied head", "transposed"])
def test_special_matrices_are_adapted_with_ranks_and_scales_of_their_own(
    tmp_path: Path, family: str
) -> None:
    config, targets = FAMILIES[family]
    write_family_checkpoint(tmp_path / "base", config)
    write_adapter(
        tmp_path / "adapter",
        Oracle(tmp_path / "base").model,
        targets,
        ranks={targets[1]: 7},
        use_rslora=True,
        alpha_pattern={targets[0]: 5},
        dtype=torch.float16,
    )
    assert_like_oracle(tmp_path / "base", tmp_path / "adapter")


def test_pytorch_computes_what_the_library_does(tmp_path: Path) -> None:
    config, targets = FAMILIES["llama"]
    write_family_checkpoint(tmp_path / "base", config)
    write_adapter(tmp_path / "adapter", Oracle(tmp_path / "base").model, targets)
    assert_like_oracle(tmp_path / "base", tmp_path / "adapter", interpreted_on=TORCH)


class Company:
    """Requests with several adapters over one model, run alone and in any company."""

    def __init__(self, directory: Path, dtype: str, quantization: Quantization = "none") -> None:
        config, targets = FAMILIES["llama"]
        write_family_checkpoint(directory / "base", config)
        sizes = sizes_of(Oracle(directory / "base").model)
        chosen = [targets, ("q_proj", "v_proj"), ("gate_proj", "lm_head"), ("o_proj", "down_proj")]
        self.adapters = [
            adapter_of(
                write_adapter(directory / f"{i}", sizes, each, rank=2 + 3 * i, seed=i),
                f"adapter-{i}",
            )
            for i, each in enumerate(chosen)
        ]
        self._options: dict[str, Any] = {
            "dtype": dtype, "quantization": quantization, "adapters": self.adapters,
        }  # fmt: skip
        self.directory = directory / "base"

    def pipeline(self, **options: Any) -> Pipeline:
        return Pipeline(self.directory, n_kv_blocks=128, **{**self._options, **options})

    def run(
        self,
        pipeline: Pipeline,
        prompts: Sequence[list[int]],
        adapters: Sequence[int | None],
        n: int,
    ) -> list[tuple[list[int], list[Tensor]]]:
        """Tokens and logits of `n` tokens of each request, all in the same iterations."""
        for row, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
            digest = "" if adapter is None else self.adapters[adapter].digest
            pipeline.admit(row, len(prompt), adapter=digest)
        spans = [Span(row, prompt) for row, prompt in enumerate(prompts)]
        results: list[tuple[list[int], list[Tensor]]] = [([], []) for _ in prompts]
        for _ in range(n):
            tokens, logits = pipeline.run(spans)
            for row, token in enumerate(tokens):
                results[row][0].append(token)
                results[row][1].append(logits[row])
            spans = [Span(row, [token]) for row, token in enumerate(tokens)]
        for row in range(len(prompts)):
            pipeline.release(row)
        return results


def assert_alone_as_in_company(company: Company, seed: int, n_requests: int, n_tokens: int) -> None:
    draw = random.Random(seed)
    prompts = [[draw.randrange(199) for _ in range(draw.randint(1, 12))] for _ in range(n_requests)]
    adapters = [draw.choice([None, 0, 1, 2, 3]) for _ in prompts]
    together = company.run(company.pipeline(), prompts, adapters, n_tokens)
    alone = company.pipeline()
    for prompt, adapter, (tokens, logits) in zip(prompts, adapters, together, strict=True):
        ((own_tokens, own_logits),) = company.run(alone, [prompt], [adapter], n_tokens)
        assert own_tokens == tokens
        assert all(torch.equal(a, b) for a, b in zip(own_logits, logits, strict=True))


needs_native = pytest.mark.skipif(native_ops() is None, reason="no native kernels")


@pytest.fixture(name="company", scope="module")
def make_company(tmp_path_factory: pytest.TempPathFactory) -> Company:
    return Company(tmp_path_factory.mktemp("company"), "bfloat16")


@needs_native
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_tokens_do_not_depend_on_the_company(company: Company, seed: int) -> None:
    assert_alone_as_in_company(company, seed, n_requests=5, n_tokens=3)


@needs_native
@pytest.mark.thorough
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), n_requests=st.integers(2, 16))
def test_tokens_do_not_depend_on_larger_company(
    company: Company, seed: int, n_requests: int
) -> None:
    assert_alone_as_in_company(company, seed, n_requests=n_requests, n_tokens=12)


@needs_native
def test_the_library_and_the_interpreter_agree_to_the_bit(company: Company) -> None:
    prompts, adapters = [[3, 5, 7], [8, 1], [9], [150, 3, 3, 4]], [0, None, 2, 0]
    native = native_ops()
    for options in ({"interpreted_on": native}, {"tp_size": 2}):
        expected = company.run(
            company.pipeline(**{**options, "interpreted_on": None}), prompts, adapters, 2
        )
        given_ = company.run(
            company.pipeline(**{**options, "interpreted_on": native}), prompts, adapters, 2
        )
        for one, other in zip(expected, given_, strict=True):
            assert one[0] == other[0]
            assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@needs_int8
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_bases_are_as_close_to_plain_ones_with_adapters_as_without(
    tmp_path: Path, quantization: Quantization
) -> None:
    company, plain = Company(tmp_path, "float32", quantization), Company(tmp_path, "float32")
    draw = random.Random(1)
    prompts = [[draw.randrange(199) for _ in range(4)] for _ in range(12)]

    def logits(of: Company, adapter: int | None) -> Tensor:
        results = of.run(of.pipeline(), prompts, [adapter] * len(prompts), 1)
        return torch.stack([rows[0] for _, rows in results])

    def error(one: Tensor, other: Tensor) -> float:
        return float((one - other).pow(2).mean().sqrt() / other.std())

    base, adapted = logits(plain, None), logits(plain, 0)
    base_error, adapted_error = (
        error(logits(company, None), base),
        error(logits(company, 0), adapted),
    )
    assert 0 < adapted_error < 2 * base_error
    assert error(adapted, base) > 1.5 * adapted_error


@needs_native
def test_logits_of_any_hidden_states_are_those_of_their_adapters(company: Company) -> None:
    stage = load(company.directory, dtype="bfloat16", adapters=company.adapters)
    hidden = torch.randn(4, 48, dtype=torch.bfloat16)
    rows = AdapterRows(np.array([2, NO_ADAPTER, 0, 2]), len(company.adapters))
    logits = stage.logits(hidden, adapters=rows)
    base = stage.logits(hidden)
    for i, adapter in enumerate(rows.adapters):
        own = AdapterRows(np.array([adapter]), len(company.adapters))
        assert torch.equal(logits[i], stage.logits(hidden[i : i + 1], adapters=own)[0])
        assert torch.equal(logits[i], base[i]) == (adapter == NO_ADAPTER)


def test_without_adapters_a_program_has_the_same_steps(tmp_path: Path) -> None:
    config, _ = FAMILIES["llama"]
    write_family_checkpoint(tmp_path / "base", config)
    write_adapter(tmp_path / "adapter", Oracle(tmp_path / "base").model, ("q_proj",))
    steps = load(tmp_path / "base").runner.program.steps
    adapted = load(tmp_path / "base", adapters=[adapter_of(tmp_path / "adapter")])
    changed = adapted.runner.program.steps
    assert not any(isinstance(step, AddLowRank) for step in steps)
    kinds = [type(step) for step in changed if not isinstance(step, AddLowRank)]
    assert kinds == [type(step) for step in steps]
    assert len(changed) == len(steps) + config.num_hidden_layers


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"model.layers.0.self_attn.r_proj": (4, 48)}, "r_proj is no linear layer"),
        ({"model.layers.7.self_attn.q_proj": (48, 48)}, "layers.7.self_attn.q_proj is no linear"),
        ({"model.layers.1.self_attn.q_proj": (48, 47)}, "q_proj has 47 inputs and 48 outputs"),
        ({"model.layers.1.mlp.up_proj": (48, 72)}, "up_proj has 72 inputs and 48 outputs"),
    ],
    ids=["no module", "no layer", "other size", "turned round"],
)
def test_modules_that_do_not_fit_are_refused(
    tmp_path: Path, sizes: dict[str, tuple[int, int]], message: str
) -> None:
    write_family_checkpoint(tmp_path / "base", LlamaConfig(**SMALL))
    targets = [name.rsplit(".", 1)[-1] for name in sizes]
    write_adapter(tmp_path / "adapter", sizes, targets)
    adapter = adapter_of(tmp_path / "adapter")
    with pytest.raises(AdapterError, match=message):
        Pipeline(tmp_path / "base", n_stages=2, adapters=[adapter])


@pytest.mark.parametrize("family", ["llama", "tied head"])
def test_scores_of_yes_and_no_need_the_head_as_it_is(tmp_path: Path, family: str) -> None:
    config, targets = FAMILIES[family]
    write_family_checkpoint(tmp_path / "base", config)
    write_adapter(tmp_path / "adapter", Oracle(tmp_path / "base").model, targets)
    with pytest.raises(AdapterError, match=r"adapter an-adapter: .*yes-no.* lm_head"):
        build_stage(
            read_config(tmp_path / "base"),
            None,
            stage_index=0,
            n_stages=2,
            tp_rank=0,
            tp_size=1,
            dtype=torch.float32,
            device=torch.device("cpu"),
            on_progress=lambda n_done, n_total: None,
            quantization="none",
            activations="rounded",
            adapters=[adapter_of(tmp_path / "adapter")],
            pooling=Pooling(
                kind="last", n_values=1, head="yes-no", answer_token_ids=(3, 4), generates=True
            ),
        )


def test_a_layer_with_too_many_digits_is_on_no_stage() -> None:
    places = ModulePlaces("model.layers", 3, range(2), "lm_head", True, {})
    assert places.is_elsewhere("model.layers.2.mlp.up_proj")
    assert not places.is_elsewhere(f"model.layers.{'1' * 5000}.mlp.up_proj")
