"""The arrangements of the tensors in GGUF files: shapes that do not fit, and older files."""

import pytest
from transformers import LlamaConfig

from services.common.gguf.architectures.names import EXPERTS
from services.common.gguf.tensor_rules import Both, Fused, Item, LatentHeads, Rule
from services.worker.models import CheckpointError
from services.worker.models.config_json import parse_config
from services.worker.models.gguf_views import RowView, Stored, make_view
from tests.checkpoints import SMALL

CONFIG = parse_config({**LlamaConfig(**SMALL).to_dict(), "architectures": ["LlamaForCausalLM"]}, {})


@pytest.mark.parametrize(
    ("rule", "shapes"),
    [
        (Both("a", "b", alternates=True), [(2, 3, 4), (2, 4, 4)]),
        (Both("a", "b", alternates=False), [(3,), (3,)]),
        (LatentHeads("a", "b"), [(2, 3), (2, 3, 4)]),
        (LatentHeads("a", "b"), [(2, 3, 4), (2, 4, 4)]),
        (LatentHeads("a", "b"), [(2, 3, 4), (1, 4, 3)]),
        (Fused("a", "v"), [(47, 8)]),
        (Item("a"), [(4,)]),
        (Item("a"), [(1, 4)]),
        ("a", [()]),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else None,
)
def test_shapes_that_no_arrangement_fits_are_refused(
    rule: Rule, shapes: list[tuple[int, ...]]
) -> None:
    stored = {name: Stored(name, shape) for name, shape in zip("ab", shapes, strict=False)}
    with pytest.raises(CheckpointError, match=r"a \[.*not the shapes of"):
        make_view(rule, stored.get, CONFIG, 1)


def test_old_files_have_tensors_of_single_experts_and_fused_heads() -> None:
    old = {"ffn_up.1": Stored("ffn_up.1", (4, 8)), "attn_qkv": Stored("attn_qkv", (80, 48))}
    expert = make_view(EXPERTS["mlp.experts.{}.up_proj"], old.get, CONFIG, 1)
    assert expert is not None
    assert (expert.sources[0].name, expert.shape) == ("ffn_up.1", (4, 8))
    parts = [
        make_view(rule, old.get, CONFIG, 0)
        for rule in (Fused("attn_qkv", "q"), Fused("attn_qkv", "k"), Fused("attn_qkv", "v"))
    ]
    assert [view.shape for view in parts if view is not None] == [(48, 48), (16, 48), (16, 48)]
    rows = [list(view.rows) for view in parts if isinstance(view, RowView)]
    assert [row for each in rows for row in each] == list(range(80))
