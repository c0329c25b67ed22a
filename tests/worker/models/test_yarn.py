"""YaRN's angles against those of `transformers`."""

from typing import Any

import pytest
import torch
from transformers import GptOssConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.worker.models.yarn import YarnConfig

SETTINGS: dict[str, dict[str, Any]] = {
    "as gpt-oss has them": {"factor": 32.0, "truncate": False},
    "whole waves": {"factor": 4.0, "truncate": True, "beta_fast": 16.0, "beta_slow": 2.0},
    "a factor of attention": {"factor": 8.0, "attention_factor": 0.7},
    "a context that was not stretched": {"factor": 1.0},
    "a ramp without a length": {"factor": 2.0, "beta_fast": 1e9, "beta_slow": 1e8},
}


@pytest.mark.parametrize("head_dim", [10, 64])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_frequencies_and_scale_are_the_oracles(settings: dict[str, Any], head_dim: int) -> None:
    rope = {"rope_theta": 150_000.0, "original_max_position_embeddings": 4096, **settings}
    config = GptOssConfig(head_dim=head_dim, rope_parameters={"rope_type": "yarn", **rope})
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    ours = YarnConfig(**rope)
    torch.testing.assert_close(ours.inverse_frequencies(head_dim), expected, rtol=1e-6, atol=0)
    assert ours.scale == scale
