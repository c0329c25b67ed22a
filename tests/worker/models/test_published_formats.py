"""Formats that programs publish: what each stores is what its numbers mean, computed by hand."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3MoeConfig

from kernels.native.groups import NativeGroupsWeight
from kernels.packing.linear import can_group
from services.worker.models import CheckpointError, UnsupportedModel
from services.worker.models.config_file import read_config
from services.worker.models.weight_format import WeightFormat
from services.worker.models.weights import Part, Shard
from tests.checkpoints import SMALL, Oracle, edit_config, write_family_checkpoint
from tests.worker.models.format_writers import blockwise, fp4, int8_rows, mlx
from tests.worker.models.quantised_writers import Writer, Written, awq, gptq, quantise, scaled
from tests.worker.models.test_quantised_checkpoints import FP8, compressed, source_of
from tests.worker.pipeline import Pipeline, Span, load

UP = "model.layers.0.mlp.up_proj"
NF4 = {
    "quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "load_in_4bit": True,
    "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": ["lm_head"], "llm_int8_threshold": 6.0, "load_in_8bit": False,
}  # fmt: skip
AUTO_ROUND = {
    "quant_method": "auto-round", "autoround_version": "0.5.1", "bits": 4, "data_type": "int",
    "group_size": 32, "sym": True, "packing_format": "auto_round:auto_gptq", "iters": 200,
    "low_gpu_mem_usage": True, "block_name_to_quantize": "model.layers,lm_head",
    "enable_quanted_input": True, "nsamples": 512, "seqlen": 2048, "act_bits": 16,
}  # fmt: skip
MODEL_OPT = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
    "producer": {"name": "modelopt", "version": "0.35.0"},
    "config_groups": {"group_0": {"targets": ["Linear"]}},
}  # fmt: skip
FP4_WEIGHTS = {"num_bits": 4, "type": "float", "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
INT4 = {"bits": 4, "group_size": 32, "is_symmetric": True}


@dataclass(frozen=True)
class Format:
    """A writer, the shape of its matrix, and the configuration that says what it has written."""

    writer: Writer
    config: Mapping[str, Any]
    shape: tuple[int, int] = (12, 96)
    key: str = "quantization_config"
    stays_packed: bool = True


def mlx_format(bits: int, group: int, mode: str | None = None) -> Format:
    config = {"group_size": group, "bits": bits, **({"mode": mode} if mode else {})}
    writer = mlx(bits, group) if mode is None else fp4(f"mlx_{mode}", group)
    return Format(writer, config, (10, 256 if group > 64 else 192), "quantization")


FORMATS = {
    "nf4": Format(blockwise(), NF4, stays_packed=False),
    "nf4-double": Format(blockwise(nested_block=4), NF4, (12, 128), stays_packed=False),
    "nf4-blocks-across-rows": Format(
        blockwise(block=128, nested_block=3), NF4, (7, 45), stays_packed=False
    ),
    "nf4-stored-as-bfloat16": Format(
        blockwise(storage=torch.bfloat16), NF4 | {"bnb_4bit_quant_storage": "bfloat16"},
        stays_packed=False,
    ),
    "fp4-of-bitsandbytes": Format(
        blockwise("fp4"), NF4 | {"bnb_4bit_quant_type": "fp4"}, stays_packed=False
    ),
    "nf4-without-its-method": Format(
        blockwise(), {**NF4, "quant_method": None}, stays_packed=False
    ),
    "int8-of-bitsandbytes": Format(
        int8_rows(), {"quant_method": "bitsandbytes", "load_in_8bit": True}, (9, 45)
    ),
    "mlx-4": mlx_format(4, 64),
    "mlx-8": mlx_format(8, 32),
    "mlx-6": mlx_format(6, 64),
    "mlx-5": mlx_format(5, 32),
    "mlx-3": mlx_format(3, 32),
    "mlx-2": mlx_format(2, 128),
    "mlx-nvfp4": mlx_format(4, 16, "nvfp4"),
    "mlx-mxfp4": mlx_format(4, 32, "mxfp4"),
    "nvfp4-of-modelopt": Format(fp4("modelopt", 16), MODEL_OPT, (10, 80)),
    "fp8-of-modelopt": Format(
        scaled(FP8, (None, None), shape=()), MODEL_OPT | {"quant_algo": "FP8"}, stays_packed=False
    ),
    "fp8-rows-of-modelopt": Format(
        scaled(FP8, (1, None), shape=(12,)),
        MODEL_OPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, stays_packed=False,
    ),
    "fp8-of-transformers-with-one-scale": Format(
        scaled(FP8, (None, None), shape=(), name="weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        stays_packed=False,
    ),
    "fp8-of-fbgemm": Format(
        scaled(FP8, (1, None)),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []},
        stays_packed=False,
    ),
    "fp8-frozen": Format(
        scaled(FP8, (None, None), shape=(1,)),
        compressed("float-quantized", FLOAT8, quantization_status="frozen"), stays_packed=False,
    ),
    "int8-frozen": Format(
        scaled(torch.int8, (1, None)),
        compressed(
            "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"},
            quantization_status="frozen", kv_cache_scheme={"num_bits": 8, "type": "float"},
        ),
    ),
    "nvfp4-of-compressed-tensors": Format(
        fp4("compressed", 16),
        compressed(
            "nvfp4-pack-quantized",
            FP4_WEIGHTS | {"strategy": "tensor_group", "group_size": 16,
                           "scale_dtype": "torch.float8_e4m3fn"},
        ),
        (10, 80),
    ),
    "mxfp4-of-compressed-tensors": Format(
        fp4("mxfp4", 32),
        compressed(
            "mxfp4-pack-quantized",
            FP4_WEIGHTS | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        ),
    ),
    "auto-round": Format(gptq(**INT4), AUTO_ROUND, (16, 80)),
    "auto-round-symmetric-whatever-is-stored": Format(
        gptq(version=2, **INT4), AUTO_ROUND, (16, 80)
    ),
    "auto-round-awq": Format(
        awq(group_size=32, is_symmetric=False),
        AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}, (16, 96),
    ),
    "auto-round-zero-points-as-they-are": Format(
        gptq(version=2, bits=4, group_size=32, is_symmetric=False),
        AUTO_ROUND | {"packing_format": "auto_round:gptqmodel", "sym": False,
                      "quant_method": "intel/auto-round"}, (16, 80),
    ),
    "gptq-of-auto-round": Format(
        gptq(**INT4), AUTO_ROUND | {"quant_method": "gptq", "damp_percent": 0.01}
        | {"packing_format": None}, (16, 80),
    ),
    "gptq-of-gptqmodel": Format(
        gptq(**INT4),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False,
         "format": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "lm_head": False,
         "pack_impl": "cpu", "mse": 0.0, "offload_to_disk": True, "offload_to_disk_path": "./x",
         "fallback": {"strategy": "rtn", "threshold": "0.5%"}, "hessian": {"chunk_size": None},
         "vram_strategy": "exclusive", "gc_mode": "interval", "act_group_aware": True,
         "meta": {"quantizer": ["gptqmodel:5.7.0"], "pack_impl": "cpu"}},
        (16, 80),
    ),
    "gptq-2-bits": Format(
        gptq(bits=2, group_size=32, is_symmetric=True),
        {"quant_method": "gptq", "bits": 2, "group_size": 32, "sym": True, "desc_act": False},
        (16, 80),
    ),
    "gptq-2-bits-with-zero-points": Format(
        gptq(bits=2, group_size=16, is_symmetric=False),
        {"quant_method": "gptq", "bits": 2, "group_size": 16, "sym": False},
        (16, 80),
    ),
    "gptq-3-bits": Format(
        gptq(bits=3, group_size=32, is_symmetric=True),
        {"quant_method": "gptq", "bits": 3, "group_size": 32, "sym": True, "desc_act": False},
        (32, 96),
    ),
    "gptq-3-bits-with-zero-points": Format(
        gptq(bits=3, group_size=16, is_symmetric=False, version=2),
        {"quant_method": "gptq", "bits": 3, "group_size": 16, "sym": False,
         "checkpoint_format": "gptq_v2"},
        (64, 96),
    ),
    "gptq-8-bits-by-name": Format(
        gptq(bits=8, group_size=16, is_symmetric=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 32,
         "dynamic": {"-:.*down_proj": {}, "+:.*\\.up_proj": {"bits": 8, "group_size": 16},
                     ".*up_proj": {"group_size": 64}}},
        (16, 80),
    ),
}  # fmt: skip


def write(directory: Path, form: Format, modules: Mapping[str, Written]) -> Path:
    """Writes a checkpoint with these modules and no other tensors."""
    said = LlamaConfig(**SMALL).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**said, form.key: form.config}))
    tensors = {
        f"{module}.{end}": tensor.contiguous()
        for module, written in modules.items()
        for end, tensor in written.tensors.items()
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_is_what_its_numbers_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("services.worker.models.weights._PIECE_BYTES", 1000)
    form = FORMATS[name]
    written = form.writer(*form.shape, torch.Generator().manual_seed(1))
    directory = write(tmp_path, form, {UP: written})
    n_out, n_in = form.shape
    for part in (
        Part(f"{UP}.weight", form.shape),
        Part(f"{UP}.weight", form.shape, Shard(0, range(3, n_out - 2))),
        Part(f"{UP}.weight", form.shape, Shard(1, range(16, n_in))),
        Part(f"{UP}.weight", form.shape, Shard(1, range(13, 30))),
    ):
        source = source_of(directory, [part])
        index = tuple(slice(span.start, span.stop) for span in part.spans)
        expected = written.weight[index]
        torch.testing.assert_close(source.joined([part]), expected, rtol=1e-6, atol=1e-6)
        table = source.rows(part)
        rows = table.rows(torch.arange(len(expected)))
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)
        if part.spans[1].start % 16 == 0 and can_group(torch.device("cpu")):
            assert isinstance(table, NativeGroupsWeight) == form.stays_packed


@pytest.mark.skipif(not can_group(torch.device("cpu")), reason="the native library is not built")
@pytest.mark.parametrize("name", ["nf4-double", "fp4-of-bitsandbytes", "nf4-blocks-across-rows"])
def test_values_of_nf4_are_rounded_where_quantising_is_asked_for(tmp_path: Path, name: str) -> None:
    form = FORMATS[name]
    written = form.writer(12, 128, torch.Generator().manual_seed(1))
    part = Part(f"{UP}.weight", (12, 128))
    source = source_of(write(tmp_path, form, {UP: written}), [part], "int4")
    assert source.group_forms([part]) is not None
    found = source.rows(part).rows(torch.arange(12))
    blocks = written.weight.view(-1, 64)
    error = (found.view(-1, 64) - blocks).abs().amax(1)
    assert (error <= blocks.abs().amax(1) * (0.51 / 127) / 0.7).all()


@pytest.mark.parametrize(
    "name",
    ["nf4-double", "mlx-4", "nvfp4-of-compressed-tensors", "mxfp4-of-compressed-tensors"],
)
def test_a_fused_projection_keeps_the_scales_of_its_parts(tmp_path: Path, name: str) -> None:
    form = FORMATS[name]
    modules = {
        f"model.layers.0.self_attn.{letter}_proj": form.writer(
            n_out, 128, torch.Generator().manual_seed(n_out)
        )
        for letter, n_out in (("q", 12), ("k", 4), ("v", 6))
    }
    if form.shape[1] % 128 and name == "mlx-4":
        form = mlx_format(4, 64)
    parts = [Part(f"{module}.weight", written.weight.shape) for module, written in modules.items()]
    source = source_of(write(tmp_path, form, modules), parts)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2))
    expected = x @ torch.cat([written.weight for written in modules.values()]).t()
    torch.testing.assert_close(source.weight(parts)(x), expected, rtol=1e-4, atol=1e-4)


def logits_of(model: Path, tokens: list[int], n_stages: int = 1, tp_size: int = 1) -> Tensor:
    pipeline = Pipeline(model, dtype="float32", n_stages=n_stages, tp_size=tp_size)
    pipeline.admit(0, len(tokens))
    return pipeline.run([Span(0, tokens)])[1]


WHOLE_MODELS = ("nf4-double", "int8-of-bitsandbytes", "mlx-4", "nvfp4-of-compressed-tensors")
"""Formats in which a whole model is compared."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "nf4-double" else pytest.mark.thorough)
        for name in WHOLE_MODELS
    ],
)
def test_a_model_with_biases_has_the_oracles_logits(tmp_path: Path, name: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}
    config = LlamaConfig(**{**SMALL, **sizes, "num_hidden_layers": 2}, attention_bias=True)
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    write_family_checkpoint(plain, config)
    form = FORMATS[name]
    quantise(plain, stored, form.writer, {})
    edit_config(stored, remove=("quantization_config",), **{form.key: form.config})
    tokens = [5, 9, 100, 3, 42]
    expected = Oracle(plain).logits(tokens)[-1:]
    found = logits_of(stored, tokens, n_stages=2, tp_size=2)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_mlx_quantises_a_tied_embedding_routers_and_stacks_of_experts(tmp_path: Path) -> None:
    """As mlx_lm publishes Qwen3 MoE: routers have bits of their own."""
    config = Qwen3MoeConfig(
        **{**SMALL, "hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2},
        moe_intermediate_size=32, num_experts=3, num_experts_per_tok=2, tie_word_embeddings=True,
    )  # fmt: skip
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    write_family_checkpoint(plain, config)
    meant = load_file(plain / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(3)
    experts: dict[str, list[Written]] = {}
    for name, weight in meant.items():
        module, _, end = name.rpartition(".")
        if end != "weight" or weight.dim() != 2:
            tensors[name] = weight
            continue
        n_out, n_in = weight.shape
        written = mlx(8 if module.endswith("mlp.gate") else 4, 32)(n_out, n_in, generator)
        meant[name] = written.weight / 4
        parts = dict(written.tensors)
        parts |= {end: parts[end] / 4 for end in ("scales", "biases")}
        if ".experts." in module:
            mlp, _, rest = module.partition(".experts.")
            stack = f"{mlp}.switch_mlp.{rest.partition('.')[2]}"
            experts.setdefault(stack, []).append(Written(parts, written.weight))
        else:
            tensors |= {f"{module}.{end}": tensor for end, tensor in parts.items()}
    for stack, members in experts.items():
        for end in ("weight", "scales", "biases"):
            tensors[f"{stack}.{end}"] = torch.stack([each.tensors[end] for each in members])
    save_file(meant, plain / "model.safetensors")
    stored.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        stored / "model.safetensors",
    )
    gates = {f"model.layers.{i}.mlp.gate": {"group_size": 32, "bits": 8} for i in range(2)}
    said = json.loads((plain / "config.json").read_text())
    settings = {"group_size": 32, "bits": 4, "mode": "affine", **gates}
    settings["model.layers.0.input_layernorm"] = False
    said |= {"quantization": settings, "quantization_config": settings}
    (stored / "config.json").write_text(json.dumps(said))
    tokens = [5, 9, 100, 3, 42]
    expected = Oracle(plain).logits(tokens)[-1:]
    for cut in ((1, 1), (2, 2)):
        found = logits_of(stored, tokens, *cut)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_stack_of_mlx_may_be_plain(tmp_path: Path) -> None:
    stack = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(4))
    modules = {"model.layers.0.block_sparse_moe.switch_mlp.down_proj": Written(
        {"weight": stack}, stack)}  # fmt: skip
    directory = write(tmp_path, FORMATS["mlx-4"], modules)
    edit_config(directory, remove=("quantization",))
    parts = [
        Part(f"model.layers.0.block_sparse_moe.experts.{i}.w2.weight", (8, 16), Shard(1, columns))
        for i, columns in enumerate((range(16), range(4, 9)))
    ]
    for i, part in enumerate(parts):
        found = source_of(directory, [part]).joined([part])
        assert found.equal(stack[i][:, part.spans[1].start : part.spans[1].stop])
    beyond = Part("model.layers.0.block_sparse_moe.experts.3.w2.weight", (8, 16))
    with pytest.raises(CheckpointError, match="has shape"):
        source_of(directory, [beyond])


def form_of(directory: Path) -> WeightFormat:
    found = read_config(directory).weight_format
    assert found is not None
    return found


def configured(directory: Path, config: Mapping[str, Any]) -> WeightFormat:
    """Returns the format that a `quantization_config` describes."""
    return form_of(write(directory, Format(int8_rows(), config), {}))


def test_a_module_of_mlx_has_no_mode_but_its_own(tmp_path: Path) -> None:
    """As mlx-lm writes a router in 8 bits beside experts in MXFP4."""
    gate = "model.layers.0.mlp.gate"
    config = {"group_size": 32, "bits": 4, "mode": "mxfp4", gate: {"group_size": 64, "bits": 8}}
    (directory := tmp_path).mkdir(exist_ok=True)
    write(directory, FORMATS["mlx-4"], {})
    edit_config(directory, quantization=config)
    own, every = form_of(directory).forms
    assert (own.bits, own.has_zeros, own.targets) == (8, True, (gate,))
    assert (every.bits, every.has_zeros) == (4, False)


KV_SCHEMES: dict[str, Mapping[str, Any]] = {
    "kv_cache_scheme": compressed("float-quantized", FLOAT8, kv_cache_scheme={"num_bits": 8}),
    "outputs": compressed(
        "float-quantized", FLOAT8,
        config_groups={
            "a": {"targets": ["re:.*[kv]_proj"], "weights": FLOAT8,
                  "output_activations": {"num_bits": 8}},
            "b": {"targets": ["Linear"], "weights": FLOAT8},
        },
    ),
    "modelopt": MODEL_OPT | {"kv_cache_quant_algo": "FP8"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"},
}  # fmt: skip


@pytest.mark.parametrize("name", KV_SCHEMES)
def test_a_quantised_kv_cache_is_not_applied_and_said(tmp_path: Path, name: str) -> None:
    assert "stored keys and values" in " ".join(configured(tmp_path, KV_SCHEMES[name]).notes)


def test_the_first_rank_says_what_is_read_in_another_form(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, Format(int8_rows(), NF4), {})
    for stage in range(2):
        with caplog.at_level("INFO"), pytest.raises(CheckpointError, match="lacks"):
            load(tmp_path, stage_index=stage, n_stages=2)
    (said,) = caplog.messages
    assert "four bits are dequantised" in said


def by_name(found: WeightFormat, module: str) -> tuple[int, int | None] | None:
    form = found.of(module)
    return None if form is None else (form.bits, form.block[1])


OWN: dict[str, tuple[Mapping[str, Any], dict[str, tuple[int, int | None] | None]]] = {
    "auto-round": (
        AUTO_ROUND | {"extra_config": {
            "lm_head": {"bits": 8, "group_size": -1},
            "model.layers.1.mlp.gate": {"bits": 16},
            ".*layers\\.2.*down_proj.*": {"bits": 8},
            "model.layers.2.mlp.down_proj": {"bits": 4, "group_size": 64},
            "act_proj": {"act_bits": 8},
        }},
        {"model.layers.0.mlp.up_proj": (4, 32), "lm_head": (8, None),
         "model.layers.1.mlp.gate": None, "model.layers.2.mlp.experts.3.down_proj": (8, 32),
         "model.layers.2.mlp.down_proj": (4, 64), "act_proj": (4, 32)},
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {
            "-:.*layers\\.1\\.": {}, "+:.*layers\\.2\\.": {"bits": 8}, ".*q_proj": {
                "group_size": -1}}},
        {"model.layers.0.mlp.up_proj": (4, 32), "model.layers.1.mlp.up_proj": None,
         "model.layers.2.self_attn.q_proj": (8, 32), "model.layers.0.self_attn.q_proj": (4, None)},
    ),
    "modelopt-wildcards": (
        MODEL_OPT | {"exclude_modules": ["lm_head", "*.mlp.gate", "model.layers.0*"]},
        {"model.layers.1.mlp.up_proj": (4, 16), "model.layers.1.mlp.gate": None,
         "model.layers.0.mlp.up_proj": None, "model.layers.1.mlp.gate_proj": (4, 16)},
    ),
    "modelopt-mixed": (
        MODEL_OPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
            "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
            "model.layers.*.down_proj": {"quant_algo": "NVFP4", "group_size": 16}}},
        {"model.layers.0.mlp.up_proj": (8, None), "model.layers.1.mlp.down_proj": (4, 16),
         "model.layers.1.mlp.up_proj": None},
    ),
    "mlx": (
        {"group_size": 64, "bits": 4, "model.layers.0.mlp.up_proj": {"bits": 6},
         "model.layers.1.mlp.up_proj": False, "lm_head": True},
        {"model.layers.0.mlp.up_proj": (6, 64), "model.layers.1.mlp.up_proj": None,
         "lm_head": (4, 64), "model.embed_tokens": (4, 64)},
    ),
    "compressed-tensors-names-before-classes": (
        compressed("float-quantized", FLOAT8, config_groups={
            "a": {"targets": ["Linear"], "weights": FLOAT8 | {
                "strategy": "block", "block_structure": [8, 8]}},
            "b": {"targets": ["re:.*up_proj"], "weights": FLOAT8 | {
                "strategy": "block", "block_structure": [4, 4]}},
            "c": {"targets": ["model.layers.1.mlp.up_proj"], "weights": FLOAT8 | {
                "strategy": "block", "block_structure": [2, 2]}},
        }),
        {"model.layers.0.mlp.down_proj": (8, 8), "model.layers.0.mlp.up_proj": (8, 4),
         "model.layers.1.mlp.up_proj": (8, 2), "lm_head": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_modules_have_settings_of_their_own(tmp_path: Path, name: str) -> None:
    config, expected = OWN[name]
    found = configured(tmp_path, config)
    assert {module: by_name(found, module) for module in expected} == expected


@pytest.mark.parametrize(
    ("file", "content", "layout"),
    [
        ("hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": {
            "quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}},
         "scaled"),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "damp_percent": 0.01,
         "desc_act": False, "sym": True, "true_sequential": True, "model_name_or_path": None,
         "model_file_base_name": "model"}, "gptq"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4,
         "version": "GEMM"}, "awq"),
    ],
)  # fmt: skip
def test_settings_may_be_in_a_file_of_their_own(
    tmp_path: Path, file: str, content: dict[str, Any], layout: str
) -> None:
    write(tmp_path, Format(int8_rows(), {}), {})
    assert read_config(tmp_path).weight_format is None
    (tmp_path / file).write_text(json.dumps(content))
    assert form_of(tmp_path).forms[0].layout == layout


REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "both-bits": (NF4 | {"load_in_8bit": True}, "load_in_4bit or load_in_8bit"),
    "auto-round-fp8": (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type"),
    "auto-round-2-bits": (AUTO_ROUND | {"bits": 2}, "bits"),
    "auto-round-packing": (AUTO_ROUND | {"packing_format": "auto_round:llm"}, "packing_format"),
    "auto-round-rotated": (AUTO_ROUND | {"rotation_config": {"a": 1}}, "rotation_config"),
    "gptq-rotated": ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "rotation"),
    "gptq-adapter": ({"quant_method": "gptq", "bits": 4, "adapter": {"name": "lora"}}, "adapter"),
    "modelopt-awq": (MODEL_OPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo"),
    "modelopt-groups": (MODEL_OPT | {"group_size": 32}, "NVFP4 with groups of 32"),
    "mlx-bits": ({"group_size": 64, "bits": 7}, "bits"),
    "mlx-mode": ({"group_size": 32, "bits": 8, "mode": "mxfp8"}, "mode"),
    "mlx-groups": ({"group_size": 16, "bits": 4}, "mode affine with groups of 16"),
    "mlx-own-bits": ({"group_size": 64, "bits": 4, "a": {"bits": "8 bits"}}, "bits"),
    "fp4-zero-points": (
        compressed("nvfp4-pack-quantized", FP4_WEIGHTS | {
            "strategy": "tensor_group", "group_size": 16, "symmetric": False}), "zero points"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, name: str) -> None:
    config, named = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=named):
        configured(tmp_path, config)


STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("nf4", {STATE: None}, "lacks the quant_state"),
        ("nf4", {STATE: torch.tensor([123], dtype=torch.uint8)}, "is no JSON"),
        ("nf4", {STATE: torch.tensor(list(b'{"blocksize": 0}'), dtype=torch.uint8)}, "blocksize 0"),
        ("nf4", {"weight": torch.zeros(575, 1, dtype=torch.uint8)}, "has 575 bytes"),
        ("nf4", {"weight.absmax": torch.ones(17)}, r"absmax has shape \[17\], not \[18\]"),
        ("nf4-double", {"weight.nested_quant_map": None}, "nested_quant_map is missing"),
        ("int8-of-bitsandbytes", {"SCB": None}, "SCB is missing"),
        ("int8-of-bitsandbytes", {"weight_format": torch.tensor(1)}, "weight_format is not 0"),
        ("int8-of-bitsandbytes", {"weight_format": torch.zeros(2)}, "weight_format is not 0"),
        ("nvfp4-of-modelopt", {"weight_scale_2": torch.ones(2)}, r"scale_2 has shape \[2\]"),
        ("nvfp4-of-modelopt", {"weight_scale_2": torch.tensor(1)}, "weight_scale_2 has"),
        ("mlx-4", {"biases": None}, "biases is missing"),
        ("mlx-4", {"scales": torch.ones(10, 2)}, r"scales has shape \[10, 2\], not \[10, 3\]"),
        ("mlx-4", {"weight": torch.ones(10, 192, dtype=torch.uint8)}, "weight has shape"),
        ("nvfp4-of-modelopt", {"weight_scale_2": None}, "weight_scale_2 is missing"),
        ("nvfp4-of-compressed-tensors", {"weight_scale": torch.ones(10, 5)}, "element type F32"),
        ("mxfp4-of-compressed-tensors", {"weight_packed": None}, "lacks"),
    ],
)
def test_files_that_are_not_as_promised_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Tensor | None], named: str
) -> None:
    form = FORMATS[name]
    written = form.writer(*form.shape, torch.Generator().manual_seed(1))
    tensors = {
        end: tensor for end, tensor in (written.tensors | changes).items() if tensor is not None
    }
    directory = write(tmp_path, form, {UP: Written(tensors, written.weight)})
    with pytest.raises(CheckpointError, match=f"model.safetensors.*{named}"):
        source_of(directory, [Part(f"{UP}.weight", form.shape)])


def test_an_infinite_divisor_of_scales_is_refused(tmp_path: Path) -> None:
    form = FORMATS["nvfp4-of-compressed-tensors"]
    written = form.writer(*form.shape, torch.Generator().manual_seed(1))
    tensors = written.tensors | {"weight_global_scale": torch.tensor([torch.inf])}
    directory = write(tmp_path, form, {UP: Written(tensors, written.weight)})
    part = Part(f"{UP}.weight", form.shape)
    with pytest.raises(CheckpointError, match=r"up_proj.* not finite"):
        source_of(directory, [part]).joined([part])


def test_weights_of_a_frozen_checkpoint_must_be_quantised(tmp_path: Path) -> None:
    form = FORMATS["fp8-frozen"]
    tensors = {"weight": torch.ones(12, 96), "weight_scale": torch.ones(1)}
    directory = write(tmp_path, form, {UP: Written(tensors, torch.ones(12, 96))})
    with pytest.raises(CheckpointError, match="F32 beside its weight_scale"):
        source_of(directory, [Part(f"{UP}.weight", (12, 96))])
    edit_config(tmp_path, quantization_config={**form.config, "format": "dense"})
    with pytest.raises(UnsupportedModel, match="format"):
        read_config(tmp_path)
