"""Quantised checkpoints: each format's matrices are what its specification says, however cut."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, Qwen3MoeConfig

from kernels.native.groups import NativeGroupsWeight
from kernels.packing.linear import can_group
from kernels.weights.linear import Quantization
from services.worker.models import CheckpointError, UnsupportedModel
from services.worker.models.checkpoint_tensors import CheckpointTensors
from services.worker.models.config_file import read_config
from services.worker.models.directory_files import DirectoryFiles
from services.worker.models.weights import Part, Shard, WantedTensors
from tests.checkpoints import (
    SMALL,
    Oracle,
    edit_config,
    write_checkpoint,
    write_family_checkpoint,
)
from tests.worker.models.quantised_writers import (
    Writer,
    as_words,
    awq,
    gptq,
    packed,
    quantise,
    scaled,
)
from tests.worker.models.test_text_half import HALVES
from tests.worker.pipeline import Pipeline, Span, load

CPU = torch.device("cpu")

# Makes the checkpoints of a scheme, by its name: the plain one and the quantised one.
Written = Callable[[str], tuple[Path, Path]]

# Sizes that leave groups of 32 and blocks of 20 and 24 unfinished.
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "head_dim": 8,
}


@dataclass(frozen=True)
class Scheme:
    """A writer, and the configuration that says what it has written."""

    writer: Writer
    config: dict[str, Any]


def compressed(format: str, weights: dict[str, Any], **config: Any) -> dict[str, Any]:
    """A configuration as compressed-tensors writes it."""
    group = {
        "targets": ["Linear"],
        "weights": {"dynamic": False, "observer": "minmax", "observer_kwargs": {}, **weights},
        "input_activations": {"num_bits": 8, "dynamic": True, "strategy": "token"},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
        **config,
    }


def of_gptq(writer: Writer, **config: Any) -> Scheme:
    return Scheme(writer, {"quant_method": "gptq", "damp_percent": 0.1, "sym": True, **config})


FP8 = torch.float8_e4m3fn
INT4 = {"num_bits": 4, "type": "int"}
SCHEMES = {
    "gptq-4-groups": of_gptq(
        gptq(bits=4, group_size=16, is_symmetric=True), bits=4, group_size=16
    ),
    "gptq-4-asymmetric-ordered": of_gptq(
        gptq(bits=4, group_size=32, is_symmetric=False, is_ordered=True),
        bits=4,
        group_size=32,
        sym=False,
        desc_act=True,
    ),
    "gptq-8-one-group": of_gptq(
        gptq(bits=8, group_size=None, is_symmetric=True), bits=8, group_size=-1, lm_head=False
    ),
    "gptq-v2": of_gptq(
        gptq(version=2, bits=4, group_size=16, is_symmetric=False),
        bits=4,
        group_size=16,
        sym=False,
        checkpoint_format="gptq_v2",
    ),
    "awq": Scheme(
        awq(group_size=16, is_symmetric=False),
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True,
         "version": "GEMM", "modules_to_not_convert": None},
    ),
    "packed-groups": Scheme(
        packed(bits=4, group_size=16, is_symmetric=True),
        compressed(
            "pack-quantized", {**INT4, "strategy": "group", "group_size": 16, "symmetric": True}
        ),
    ),
    "packed-asymmetric-ordered": Scheme(
        packed(bits=4, group_size=16, is_symmetric=False, is_ordered=True),
        compressed(
            "pack-quantized",
            {**INT4, "strategy": "group", "group_size": 16, "symmetric": False,
             "actorder": "group"},
        ),
    ),
    "packed-8-channels": Scheme(
        packed(bits=8, group_size=None, is_symmetric=False),
        compressed(
            "pack-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
        ),
    ),
    "int8-channels": Scheme(
        scaled(torch.int8, (1, None)),
        compressed(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        ),
    ),
    "int8-asymmetric-tensor": Scheme(
        scaled(torch.int8, (None, None), shape=(1,), has_zeros=True),
        compressed(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False},
        ),
    ),
    "float8-channels": Scheme(
        scaled(FP8, (1, None)),
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ),
    "float8-tensor": Scheme(
        scaled(FP8, (None, None), shape=()),
        compressed("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ),
    "float8-blocks": Scheme(
        scaled(FP8, (24, 20)),
        compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 20]},
        ),
    ),
    "fp8-blocks": Scheme(
        scaled(FP8, (24, 20), name="weight_scale_inv"),
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
         "weight_block_size": [24, 20]},
    ),
    "fp8-tensor": Scheme(
        scaled(FP8, (None, None), shape=()),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
}  # fmt: skip


def write(directory: Path, scheme: Scheme, **how: Any) -> tuple[Path, Path]:
    """Writes a checkpoint with the meaning of random quantised matrices, and one with these."""
    plain, quantised = directory / "plain", directory / "quantised"
    quantise(write_checkpoint(plain, **SIZES), quantised, scheme.writer, scheme.config, **how)
    return plain, quantised


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """What `write` makes of a scheme, once, since writers are slow; nobody may change the files."""

    @cache
    def write_once(scheme: str) -> tuple[Path, Path]:
        return write(tmp_path_factory.mktemp(scheme), SCHEMES[scheme])

    return write_once


# One scheme of each kind of file, whose matrices are compared too; the others where there is time.
OFTEN = {"gptq-4-asymmetric-ordered", "awq", "packed-groups", "int8-channels", "float8-blocks"}


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(scheme, marks=() if scheme in OFTEN else pytest.mark.thorough)
        for scheme in SCHEMES
    ],
)
def test_a_quantised_checkpoint_computes_what_its_numbers_mean(
    written: Written, scheme: str
) -> None:
    plain, quantised = written(scheme)
    tokens = [5, 9, 100, 3, 42, 198, 7]
    expected = Oracle(plain).logits(tokens)
    pipeline = Pipeline(quantised, n_stages=2, tp_size=2)
    pipeline.admit(0, len(tokens))
    found = pipeline.run([Span(0, tokens)])[1]
    torch.testing.assert_close(found, expected[-1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("piece_bytes", [pytest.param(1 << 24, marks=pytest.mark.thorough), 100])
def test_any_part_of_a_quantised_matrix_is_that_part_of_its_meaning(
    written: Written, monkeypatch: pytest.MonkeyPatch, scheme: str, piece_bytes: int
) -> None:
    monkeypatch.setattr("services.worker.models.weights._PIECE_BYTES", piece_bytes)
    plain, quantised = written(scheme)
    weights = load_file(plain / "model.safetensors")
    up, down = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "down"))
    parts = [
        Part(up, (80, 48), Shard(0, range(37, 61))),
        Part(up, (80, 48), Shard(0, range(3, 4))),
        Part(up, (80, 48), Shard(1, range(21, 43))),
        Part(down, (48, 80), Shard(1, range(39, 80))),
        Part(down, (48, 80), Shard(0, range(0))),
        Part(down, (48, 80)),
    ]
    wanted = WantedTensors(0, 1)
    for part in parts:
        wanted.joined([part])
    steps: list[tuple[int, int]] = []
    source = CheckpointTensors(
        DirectoryFiles(quantised),
        wanted,
        dtype=torch.float32,
        device=torch.device("cpu"),
        on_progress=lambda *step: steps.append(step),
        weight_format=read_config(quantised).weight_format,
    )
    for part in parts:
        index = tuple(slice(span.start, span.stop) for span in part.spans)
        expected = weights[part.name][index]
        torch.testing.assert_close(source.joined([part]), expected, rtol=1e-6, atol=1e-6)
    assert steps[-1][0] == steps[-1][1] > 0


@pytest.mark.skipif(not can_group(CPU), reason="the native library is not built")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("piece_bytes", [pytest.param(1 << 24, marks=pytest.mark.thorough), 100])
def test_numbers_stay_as_they_are_where_groups_are_neighbouring_inputs(
    written: Written, monkeypatch: pytest.MonkeyPatch, scheme: str, piece_bytes: int
) -> None:
    monkeypatch.setattr("services.worker.models.weights._PIECE_BYTES", piece_bytes)
    plain, quantised = written(scheme)
    weights = load_file(plain / "model.safetensors")
    up, down = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "down"))
    are_kept = "ordered" not in scheme and "8-b" not in scheme and "fp8" not in scheme
    are_kept = are_kept and "float8" not in scheme
    has_one_group = any(word in scheme for word in ("channels", "tensor", "one-group"))
    for part, is_kept in (
        (Part(up, (80, 48)), are_kept),
        (Part(up, (80, 48), Shard(0, range(37, 61))), are_kept),
        (Part(down, (48, 80), Shard(1, range(32, 80))), are_kept),
        (Part(down, (48, 80), Shard(1, range(40, 73))), are_kept),
        (Part(down, (48, 80), Shard(1, range(39, 80))), are_kept and has_one_group),
    ):
        found = source_of(quantised, [part]).rows(part)
        assert isinstance(found, NativeGroupsWeight) == is_kept
        index = tuple(slice(span.start, span.stop) for span in part.spans)
        expected = weights[part.name][index]
        rows = found.rows(torch.arange(len(expected)))
        torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-6)
        x = torch.randn(2, expected.shape[1], generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(found(x), x @ expected.t(), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not can_group(CPU), reason="the native library is not built")
@pytest.mark.parametrize(
    ("scheme", "bits", "n_scales"),
    # Zero points of symmetric matrices are the middle, and take no memory.
    [("gptq-4-groups", 4, 3), ("packed-groups", 4, 3), ("int8-channels", 8, 1)],
)
def test_a_fused_projection_takes_the_bits_of_its_files(
    written: Written, scheme: str, bits: int, n_scales: int
) -> None:
    _, quantised = written(scheme)
    q, k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
    parts = [Part(q, (48, 48)), Part(k, (16, 48)), Part(v, (16, 48))]
    source = source_of(quantised, parts)
    forms = source.group_forms(parts)
    assert forms is not None
    assert {form.bits for form in forms} == {bits}
    packed = source.weight(parts)
    assert packed.shape == (80, 48)
    # Scales are float32 in this model, and panels have more outputs than there are.
    assert source.grouped_bytes(parts) == 80 * 48 * bits // 8 + 80 * n_scales * 4


@pytest.mark.parametrize("other", ["packed-8-channels", "float8-channels"])
def test_parts_of_other_schemes_become_one_projection(tmp_path: Path, other: str) -> None:
    """Eight bits beside four stay numbers; beside floats all of them are dequantised."""
    first = SCHEMES["packed-groups"]
    config = compressed("pack-quantized", {})
    (four,), (eight,) = (
        SCHEMES[name].config["config_groups"].values() for name in ("packed-groups", other)
    )
    config["config_groups"] = {
        "a": {
            **eight,
            "targets": ["re:.*[.](v|up)_proj"],
            "format": SCHEMES[other].config["format"],
        },
        "b": four,
    }
    writers = dict.fromkeys(("v_proj", "up_proj"), SCHEMES[other].writer)
    plain, quantised = write(tmp_path, Scheme(first.writer, config), others=writers)
    tokens = [5, 9, 100, 3]
    pipeline = Pipeline(quantised)
    pipeline.admit(0, len(tokens))
    found = pipeline.run([Span(0, tokens)])[1]
    expected = Oracle(plain).logits(tokens)[-1:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not can_group(CPU), reason="the native library is not built")
@pytest.mark.parametrize(
    ("scheme", "quantization", "are_kept"),
    [
        ("gptq-4-groups", "int8", True),
        ("gptq-4-groups", "int4", True),
        ("int8-channels", "int4", False),
    ],
)
def test_fewer_bits_than_the_files_have_are_made(
    written: Written, scheme: str, quantization: Quantization, are_kept: bool
) -> None:
    _, quantised = written(scheme)
    up = Part("model.layers.1.mlp.up_proj.weight", (80, 48))
    source = source_of(quantised, [up], quantization)
    assert (source.group_forms([up]) is not None) == are_kept
    assert isinstance(source.table(up), NativeGroupsWeight)


def source_of(
    directory: Path, parts: list[Part], quantization: Quantization = "none"
) -> CheckpointTensors:
    """A source of some parts of the checkpoint, in float32."""
    wanted = WantedTensors(0, 1)
    for part in parts:
        wanted.joined([part])
    return CheckpointTensors(
        DirectoryFiles(directory),
        wanted,
        dtype=torch.float32,
        device=CPU,
        on_progress=lambda n_done, n_total: None,
        quantization=quantization,
        activations="exact",
        weight_format=read_config(directory).weight_format,
    )


def test_modules_that_are_not_quantised_are_read_as_they_are(tmp_path: Path) -> None:
    scheme = SCHEMES["float8-channels"]
    ignored = compressed(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        ignore=["lm_head", "re:.*down_proj"],
    )
    plain, quantised = write(tmp_path, Scheme(scheme.writer, ignored), keeps="down_proj")
    assert last_logits(quantised).equal(last_logits(plain))


OF_EXPERTS = ("gptq-4-asymmetric-ordered", "awq", "float8-channels")
"""Schemes in which a model with experts is compared."""

OF_LATENTS = "fp8-blocks"
"""The scheme in which a model with latent attention is compared."""


@pytest.mark.parametrize("scheme", OF_EXPERTS)
def test_experts_are_quantised_too(tmp_path: Path, scheme: str) -> None:
    config = Qwen3MoeConfig(
        **{**SMALL, **SIZES},
        moe_intermediate_size=32,
        num_experts=3,
        num_experts_per_tok=2,
    )
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    write_family_checkpoint(plain, config)
    quantise(plain, quantised, SCHEMES[scheme].writer, SCHEMES[scheme].config)
    tokens = [5, 9, 100, 3, 42]
    expected = Oracle(plain).logits(tokens)[-1:]
    pipeline = Pipeline(quantised, tp_size=2)
    pipeline.admit(0, len(tokens))
    found = pipeline.run([Span(0, tokens)])[1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_latents_become_keys_and_values_by_is_quantised_too(tmp_path: Path) -> None:
    # As DeepSeek-V3 is published. Blocks are of several heads, and of the keys and values of one.
    config = DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": None},
        kv_lora_rank=28,
        q_lora_rank=26,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=9,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
    )
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    write_family_checkpoint(plain, config)
    quantise(plain, quantised, SCHEMES[OF_LATENTS].writer, SCHEMES[OF_LATENTS].config)
    tokens = [5, 9, 100, 3, 42]
    expected = Oracle(plain).logits(tokens)[-1:]
    pipeline = Pipeline(quantised, n_stages=2, tp_size=2)
    pipeline.admit(0, len(tokens))
    found = pipeline.run([Span(0, tokens)])[1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_text_half_of_a_checkpoint_may_be_quantised(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, HALVES["gemma3"])
    edit_config(tmp_path, quantization_config=SCHEMES["fp8-blocks"].config)
    found = read_config(tmp_path).weight_format
    assert found is not None
    assert found.forms[0].block == (24, 20)


def last_logits(directory: Path) -> torch.Tensor:
    pipeline = Pipeline(directory)
    pipeline.admit(0, 3)
    return pipeline.run([Span(0, [4, 5, 6])])[1]


def test_groups_of_modules_have_forms_of_their_own(tmp_path: Path) -> None:
    by_channel = {"num_bits": 8, "type": "float", "strategy": "channel"}
    by_tensor = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    config = compressed("float-quantized", by_channel)
    config["config_groups"] = {
        "a": {"targets": ["re:.*mlp[.].*"], "weights": by_channel},
        "b": {"targets": ["model.layers.0.self_attn.q_proj"], "weights": by_channel},
        "c": {"targets": ["Linear"], "weights": by_tensor},
    }
    plain, quantised = write(tmp_path, SCHEMES["float8-channels"])
    edit_config(quantised, quantization_config=config)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_proj\.weight_scale has"):
        load(quantised)
    config["config_groups"]["b"]["targets"] = ["self_attn"]
    edit_config(quantised, quantization_config=config)
    assert last_logits(quantised).equal(last_logits(plain))


def filled(value: int, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.int32)


@pytest.mark.parametrize(
    ("scheme", "changes", "named"),
    [
        ("gptq-4-groups", {"qweight": None}, r"lacks model\.layers\.0\.self_attn\.q_proj\.weight"),
        ("gptq-4-asymmetric-ordered", {"qzeros": None}, r"q_proj\.qzeros is missing"),
        ("gptq-4-asymmetric-ordered", {"g_idx": None}, r"q_proj\.g_idx is missing"),
        ("gptq-4-groups", {"scales": torch.ones(3, 47)}, r"scales has shape \[3, 47\], not \[3, 4"),
        ("awq", {"qweight": torch.ones(48, 6)}, r"qweight has element type F32"),
        ("packed-groups", {"weight_shape": torch.tensor([48, 47])}, r"weight_shape is \[48, 47\]"),
        ("int8-channels", {"weight_scale": None}, r"q_proj\.weight_scale is missing"),
        ("int8-channels", {"weight": torch.ones(48, 48)}, r"F32 beside its weight_scale"),
        ("fp8-blocks", {"weight_scale_inv": torch.ones(2, 2)}, r"weight_scale_inv has shape"),
        (
            "int8-channels",
            {"weight_scale": torch.ones(1, 48)},
            r"has shape \[1, 48\], not \[48, 1\]",
        ),
        ("int8-channels", {"weight_scale": torch.ones(1, 48, 1)}, r"has shape \[1, 48, 1\]"),
        ("float8-channels", {"weight": torch.ones(48, 48, dtype=torch.int8)}, "element type I8"),
        ("int8-channels", {"weight": torch.ones(48, 48).to(FP8)}, "element type F8_E4M3"),
        ("int8-channels", {"weight_scale": torch.full((48, 1), torch.inf)}, r"q_proj.* not finite"),
        ("fp8-blocks", {"weight_scale_inv": torch.full((2, 3), torch.nan)}, "not finite"),
        ("gptq-4-groups", {"scales": torch.full((3, 48), torch.nan).half()}, "not finite"),
        ("packed-groups", {"weight_scale": torch.full((48, 3), torch.nan)}, "not finite"),
        ("gptq-4-groups", {"qzeros": filled(0x12345678, 3, 6)}, "q_proj.qzeros has zero points"),
        ("packed-groups", {"weight_zero_point": filled(5, 6, 3)}, "zero_point has zero points"),
        ("int8-channels", {"weight_zero_point": torch.ones(48, 1)}, "zero_point has zero points"),
    ],
)
def test_files_that_are_not_as_promised_are_refused(
    tmp_path: Path,
    written: Written,
    scheme: str,
    changes: dict[str, torch.Tensor | None],
    named: str,
) -> None:
    quantised = shutil.copytree(written(scheme)[1], tmp_path / "quantised")
    change(quantised, changes)
    with pytest.raises(CheckpointError, match=named) as caught:
        load(quantised)
    assert f"{quantised}/model.safetensors" in str(caught.value)


def test_groups_of_awq_must_be_whole(tmp_path: Path, written: Written) -> None:
    quantised = shutil.copytree(written("awq")[1], tmp_path / "quantised")
    edit_config(quantised, quantization_config={**SCHEMES["awq"].config, "group_size": 17})
    with pytest.raises(CheckpointError, match="groups of 17 do not divide 48 inputs"):
        load(quantised)


def change(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Changes tensors of the first projection."""
    path = directory / "model.safetensors"
    prefix = "model.layers.0.self_attn.q_proj."
    tensors = load_file(path) | {f"{prefix}{name}": value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)


@pytest.mark.parametrize("index", [-1, 3])
def test_an_input_of_a_group_that_is_not_there_is_refused(
    tmp_path: Path, written: Written, index: int
) -> None:
    quantised = shutil.copytree(written("gptq-4-asymmetric-ordered")[1], tmp_path / "quantised")
    change(quantised, {"g_idx": torch.full((48,), index, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match="names scales that are not there"):
        load(quantised)


EIGHTS, MINUS_ONES = as_words([8] * 8, 4)[0], filled(-1, 48)


@pytest.mark.parametrize(
    ("scheme", "settings", "changes"),
    [
        # A symmetric zero point is the middle, although the format's version stores one less.
        ("gptq-4-groups", {}, {"qzeros": filled(EIGHTS, 2, 6)}),
        ("gptq-4-groups", {}, {"qzeros": filled(EIGHTS, 3, 6)}),
        ("gptq-4-groups", {}, {"qzeros": None}),
        ("int8-channels", {}, {"weight_zero_point": torch.zeros(48, 1)}),
        ("gptq-4-groups", {"checkpoint_format": "gptq_v2"}, {}),
        ("packed-groups", {}, {"weight_zero_point": filled(EIGHTS, 6, 3)}),
        # An order that is not set leaves groups of neighbours; one that is set counts.
        ("gptq-4-asymmetric-ordered", {"desc_act": False}, {}),
        ("gptq-4-groups", {"desc_act": False}, {"g_idx": torch.zeros(0, dtype=torch.int32)}),
        ("gptq-4-groups", {"desc_act": False}, {"g_idx": filled(0, 48)}),
        ("gptq-4-groups", {"desc_act": False}, {"g_idx": MINUS_ONES}),
        ("gptq-4-groups", {"desc_act": None}, {"g_idx": filled(0, 48)}),
        ("packed-groups", {}, {"weight_g_idx": MINUS_ONES}),
        ("packed-groups", {}, {"weight_g_idx": filled(0, 48)}),
        # Where settings are missing, the tensors decide.
        ("gptq-4-asymmetric-ordered", {"sym": None, "desc_act": None}, {}),
        ("gptq-v2", {"sym": None, "desc_act": None, "format": "gptq"}, {}),
    ],
)
def test_what_writers_leave_in_tensors_that_do_not_count_changes_nothing(
    tmp_path: Path,
    written: Written,
    scheme: str,
    settings: dict[str, Any],
    changes: dict[str, torch.Tensor | None],
) -> None:
    plain, original = written(scheme)
    quantised = shutil.copytree(original, tmp_path / "quantised")
    change(quantised, changes)
    config = {**SCHEMES[scheme].config, **settings}
    edit_config(quantised, quantization_config=config)
    name = "model.layers.0.self_attn.q_proj.weight"
    wanted = WantedTensors(0, 1)
    part = Part(name, (48, 48))
    wanted.joined([part])
    source = CheckpointTensors(
        DirectoryFiles(quantised),
        wanted,
        dtype=torch.float32,
        device=CPU,
        on_progress=lambda done, total: None,
        weight_format=read_config(quantised).weight_format,
    )
    expected = load_file(plain / "model.safetensors")[name]
    torch.testing.assert_close(source.joined([part]), expected, rtol=1e-6, atol=1e-6)


def test_what_is_quantised_must_not_be_listed_as_plain(tmp_path: Path) -> None:
    _, quantised = write(tmp_path, SCHEMES["fp8-tensor"])
    config = {**SCHEMES["fp8-tensor"].config, "ignored_layers": ["self_attn.q_proj"]}
    edit_config(quantised, quantization_config=config)
    with pytest.raises(CheckpointError, match=r"q_proj is not"):
        load(quantised)


WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel"}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "hqq", "bits": 4}, "quant_method 'hqq' is not one of .* GGUF"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
        ({"quant_method": ["gptq"]}, "quant_method"),
        ({"bits": 4}, "quant_method None"),
        ({"quant_method": "gptq", "bits": 5}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "128"}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "sym": "false"}, "sym"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:a": {"bits": 5}}}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}}, "regular expression"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {r"-:(a)\1": {}}}, "groupref"),
        (compressed("int-quantized", WEIGHTS, ignore=["re:a"] * 1001), "1000 regular"),
        ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "rotation"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "fp8", "modules_to_convert": ["embed"]}, "modules_to_convert"),
        (compressed("nvfp4-pack-quantized", WEIGHTS), "format"),
        (compressed("marlin-24", WEIGHTS), "format"),
        (compressed("pack-quantized", {**WEIGHTS, "num_bits": 3}), "num_bits"),
        (compressed("int-quantized", {**WEIGHTS, "type": "float"}), "int-quantized"),
        (compressed("int-quantized", {**WEIGHTS, "strategy": "attn_head"}), "strategy"),
        (
            compressed("int-quantized", WEIGHTS, quantization_status="calibration"),
            "calibration|quantization_status",
        ),
        (compressed("int-quantized", WEIGHTS, transform_config={"a": 1}), "transform_config"),
        (compressed("int-quantized", WEIGHTS, sparsity_config={"format": "24"}), "sparsity_config"),
        (compressed("int-quantized", WEIGHTS, config_groups={"W8A8": ["Linear"]}), "W8A8"),
    ],
)
def test_a_scheme_that_is_not_known_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    directory = edit_config(write_checkpoint(tmp_path), quantization_config=config)
    with pytest.raises(UnsupportedModel, match=named):
        read_config(directory)
