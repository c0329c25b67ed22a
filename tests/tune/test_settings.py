"""Settings that are wrong are refused by name, and workloads are what they say."""

import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from services.tune.model_shape import ModelShape
from services.tune.settings import TuneSettings
from services.tune.workload import Workload
from tests.checkpoints import edit_config, write_checkpoint
from tests.ggufs import write_gguf

DEMO = Path(__file__).parents[2] / "models" / "demo"


def load(*arguments: str) -> TuneSettings:
    return TuneSettings.load("tune", ["--model", str(DEMO), *arguments])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--prompt-tokens", "9-3"], "prompt_tokens: "),
        (["--output-tokens", "many"], "output_tokens: "),
        (["--budget-s", "3"], "budget_s: "),
        (["--budget-s", "inf"], "budget_s: "),
        (["--rate", "0"], "rate: "),
        (["--rate", "inf"], "rate: "),
        (["--seed=-1"], "seed: "),
        (["--prompt-tokens", "99999999999999999999"], "prompt_tokens: "),
        (["--trace", "nowhere.csv"], "trace: "),
        (["--ttft-p99-s=-1"], "ttft_p99_s: "),
        (["--batch-size", "3"], "batch-size"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_is_wrong_is_named_on_one_line(arguments: list[str], name: str) -> None:
    with pytest.raises(SystemExit) as refusal:
        load(*arguments)
    message = str(refusal.value)
    assert name in message
    assert len(message.splitlines()) == 1


def test_lengths_keep_their_bounds_and_the_model_s_context() -> None:
    workload = Workload.of(load("--prompt-tokens", "8-2000", "--output-tokens", "5"), 100)
    assert {each.n_output for each in workload.lengths} == {5}
    assert workload.max_request_len <= 100


@pytest.mark.parametrize("lengths", ["--prompt-tokens", "--output-tokens"])
def test_a_workload_that_does_not_fit_is_refused(lengths: str) -> None:
    with pytest.raises(ValueError, match=r"^prompt_tokens, output_tokens: no request fits"):
        Workload.of(load(lengths, "2000"), 1000)


def test_a_trace_gives_the_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:00:00,100,7\n2023-11-16 18:00:01,5000,7\n2023-11-16 18:00:02,30,9\n"
    )
    workload = Workload.of(load("--trace", str(path)), 1000)
    assert [(each.n_prompt, each.n_output) for each in workload.lengths] == [(100, 7), (30, 9)]


@pytest.mark.parametrize(
    "rows",
    ["2023-11-16 18:00:00,100\n", "2023-11-16 18:00:00,many,3\n", '"' + 2**18 * "a"],
    ids=["short", "word", "huge"],
)
def test_a_trace_that_is_wrong_is_refused_by_its_line(rows: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    with pytest.raises(ValueError, match=r"trace\.csv, line \d: "):
        Workload.of(load("--trace", str(path)), 1000)


def test_requests_of_a_trace_that_have_no_tokens_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:00:00,{n},{m}\n" for n, m in ((-9, 5), (5, 0), (7, 3)))
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    assert len(Workload.of(load("--trace", str(path)), 1000).lengths) == 1


def test_the_goal_follows_from_limits_and_rate() -> None:
    assert Workload.of(load(), 1024).unit == "tokens/s"
    assert Workload.of(load("--tpot-p99-s", "0.1"), 1024).finds_rate
    assert not Workload.of(load("--tpot-p99-s", "0.1", "--rate", "3"), 1024).finds_rate


def test_sizes_are_read_from_the_checkpoint(tmp_path: Path) -> None:
    shape = ModelShape.read(DEMO)
    assert (shape.vocab_size, shape.max_model_len) == (4096, 1024)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 10, "n_layer": 2}))
    with pytest.raises(ValueError, match=r"config\.json has no num_key_value_heads"):
        ModelShape.read(tmp_path)


def test_sizes_are_read_from_a_gguf_file(tmp_path: Path) -> None:
    file = write_gguf(write_checkpoint(tmp_path), tmp_path / "m.gguf")
    n_elements = sum(map(torch.numel, load_file(tmp_path / "model.safetensors").values()))
    shape = ModelShape.read(file)
    assert (shape.n_layers, shape.n_kv_heads, shape.vocab_size) == (3, 2, 199)
    assert (shape.max_model_len, shape.n_weight_bytes) == (256, 2 * n_elements)
    write_checkpoint(tmp_path, hidden_size=192, intermediate_size=128)
    file = write_gguf(tmp_path, tmp_path / "m.gguf", kind=GGMLQuantizationType.Q4_0)
    assert ModelShape.read(file).n_weight_bytes < 1.2 * file.stat().st_size


@pytest.mark.parametrize(
    ("quantization", "factor"),
    [
        (None, 1),
        ({"quant_method": "gptq", "bits": 4}, 1),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, 4),
        ({"quant_method": "fp8"}, 2),
        ({"quant_method": "mxfp4"}, 4),
        ({"config_groups": {"a": {"weights": {"num_bits": 4}}}}, 1),
        ({"config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}}}}, 2),
        ({"config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}}, 1),
        ({"bits": "four"}, 1),
        ({"quant_method": "auto-round", "bits": 4}, 1),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "config_groups": {}}, 2),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 1),
    ],
    ids=[
        "plain",
        "gptq",
        "gptq ordered",
        "fp8",
        "mxfp4",
        "packed",
        "packed floats",
        "nvfp4",
        "nonsense",
        "auto-round",
        "nf4",
        "int8",
        "modelopt fp8",
        "modelopt nvfp4",
    ],
)
def test_quantised_weights_count_as_they_are_in_memory(
    tmp_path: Path, quantization: object, factor: int
) -> None:
    edit_config(write_checkpoint(tmp_path), quantization_config=quantization)
    n_bytes = (tmp_path / "model.safetensors").stat().st_size
    assert ModelShape.read(tmp_path).n_weight_bytes == factor * n_bytes
