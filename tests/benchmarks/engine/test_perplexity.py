"""The perplexity of a text: its windows, and what a real service says of them."""

import asyncio
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from benchmarks.engine import perplexity
from benchmarks.machine import ROOT

DEMO = ROOT / "models" / "demo"
TEXT = "If the file does not exist, it is made, and nothing is said. " * 4


@given(st.lists(st.integers(), min_size=1, max_size=40), st.integers(1, 12))
def test_windows_are_whole_and_leave_out_less_than_one(tokens: list[int], size: int) -> None:
    if len(tokens) < size:
        with pytest.raises(ValueError, match="less than a window"):
            perplexity.windows_of(tokens, size)
        return
    windows = perplexity.windows_of(tokens, size)
    joined = [token for window in windows for token in window]
    assert {len(window) for window in windows} == {size}
    assert joined == tokens[: len(joined)]
    assert len(tokens) - len(joined) < size


@pytest.mark.system
@pytest.mark.thorough
def test_a_service_scores_windows_as_transformers_does() -> None:
    windows, logprob = asyncio.run(
        perplexity.ours(DEMO, TEXT, 16, options=["--dtype=float32", "--threads=1"])
    )
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    expected = 0.0
    for window in windows:
        tokens = torch.tensor([list(window)])
        with torch.inference_mode():
            logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
        expected += float(logprobs.gather(1, tokens[0, 1:, None]).sum())
    assert len(windows) > 1
    assert math.isclose(logprob, expected, rel_tol=1e-4)
