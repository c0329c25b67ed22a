"""A GGUF file as it was published: its tokens are those of the checkpoint that was made of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models import smollm2
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.tokenizer import Tokenizer
from services.worker.models.config_file import read_config
from tests.real.test_tokens import PROMPTS
from tests.worker.pipeline import Pipeline, Span

N_TOKENS = 16
TIE = 0.25
"""What a logit may be below the highest: two steps of bfloat16 from 16 to 32, where these are."""


@pytest.fixture(scope="module", name="file")
def download_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2.download(tmp_path_factory.mktemp("gguf"))


def greedy(pipeline: Pipeline, prompt: tuple[int, ...]) -> list[int]:
    """Returns the tokens that are likeliest after a prompt."""
    pipeline.admit(0, len(prompt))
    tokens = list(prompt)
    found: list[int] = []
    while len(found) < N_TOKENS:
        tokens = pipeline.run([Span(0, tokens)])[0]
        found += tokens
    pipeline.release(0)
    return found


@pytest.fixture(scope="module", name="oracle")
def load_oracle(file: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )


def test_greedy_tokens_are_those_that_transformers_makes_of_the_file(
    file: Path, oracle: Any
) -> None:
    tokenizer = Tokenizer.from_model(file)
    pipeline = Pipeline(file, dtype="float32", n_stages=2)
    for prompt in map(tokenizer.to_tokens, PROMPTS):
        expected = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=N_TOKENS, do_sample=False, eos_token_id=None
        )
        assert greedy(pipeline, prompt) == expected[0, len(prompt) :].tolist()


def test_tokens_of_the_checkpoint_of_its_weights_are_as_likely(
    file: Path, checkpoint: Path
) -> None:
    """Weights as the file has them, and rounded to bfloat16: where the likeliest tokens differ,
    they are a tie."""
    tokenizer = Tokenizer.from_model(file)
    packed, rounded = Pipeline(file), Pipeline(checkpoint)
    for prompt in map(tokenizer.to_tokens, PROMPTS):
        for pipeline in (packed, rounded):
            pipeline.admit(0, len(prompt))
        tokens = list(prompt)
        for _ in range(N_TOKENS):
            _, logits = packed.run([Span(0, tokens)])
            tokens, _ = rounded.run([Span(0, tokens)])
            assert logits[0].max() - logits[0, tokens[0]] <= TIE
        for pipeline in (packed, rounded):
            pipeline.release(0)


def test_tokens_and_ends_are_those_of_the_checkpoint(file: Path, checkpoint: Path) -> None:
    tokenizer, oracle = Tokenizer.from_model(file), AutoTokenizer.from_pretrained(checkpoint)
    for text in PROMPTS:
        assert list(tokenizer.to_tokens(text)) == oracle(text).input_ids
    # The file also has the ends of texts that llama.cpp knows, here "<|endoftext|>".
    assert read_config(file).eos_token_ids == (*read_config(checkpoint).eos_token_ids, 0)
    ours, theirs = ChatTemplate.from_model(file), ChatTemplate.from_model(checkpoint)
    assert ours is not None
    assert theirs is not None
    assert ours.source == theirs.source
