"""The page of tested checkpoints says what registries and tests say."""

import pytest

from services.worker.models.quantised.gguf_blocks import TYPES
from services.worker.models.quantization_config import METHODS
from tests import checkpoint_tables
from tests.worker.models.test_gguf import PACKED

PAGE = checkpoint_tables.PAGE.read_text(encoding="utf-8")


def test_the_page_has_what_is_tested() -> None:
    assert checkpoint_tables.written(PAGE) == PAGE, (
        "`python -m tests.checkpoint_tables` writes the tables"
    )


@pytest.mark.parametrize("row", ["| GPTQ |", "| LlamaForCausalLM |"])
def test_a_table_without_a_row_is_written_anew(row: str) -> None:
    lines = [line for line in PAGE.splitlines(keepends=True) if not line.startswith(row)]
    assert checkpoint_tables.written("".join(lines)) == PAGE


def test_every_method_and_every_type_of_blocks_is_tested() -> None:
    assert set(checkpoint_tables.LABELS) == {*METHODS, "mlx"}
    assert set(PACKED) == set(TYPES)
