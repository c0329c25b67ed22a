"""Layouts fit the machine and the model."""

import pytest

from services.tune.layout import Layout, layouts


def test_two_processors_have_all_their_layouts() -> None:
    assert list(layouts(2, max_ranks=8, n_layers=12, n_kv_heads=4)) == [
        Layout(1, 1, 2),
        Layout(2, 1, 1),
        Layout(1, 2, 1),
        Layout(1, 1, 1),
    ]


@pytest.mark.parametrize(
    ("n_cpus", "max_ranks", "n_layers", "n_kv_heads"),
    [(1, 8, 12, 4), (3, 8, 1, 4), (16, 4, 2, 3), (64, 8, 80, 8), (8, 1, 12, 4)],
)
def test_layouts_fit(n_cpus: int, max_ranks: int, n_layers: int, n_kv_heads: int) -> None:
    found = layouts(n_cpus, max_ranks=max_ranks, n_layers=n_layers, n_kv_heads=n_kv_heads)
    assert found[0] == Layout(1, 1, n_cpus)
    assert len(set(found)) == len(found) <= 8
    assert n_cpus == 1 or found[-1] == Layout(1, 1, n_cpus - 1)
    for layout in found:
        assert layout.stages * layout.tp <= max_ranks
        assert layout.stages * layout.tp * layout.threads <= n_cpus
        assert layout.stages <= n_layers
        assert n_kv_heads % layout.tp == 0


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(1, 1, 2), "1 stage with 2 threads"),
        (Layout(2, 1, 1), "2 stages with 1 thread each"),
        (Layout(2, 2, 4), "2 stages of 2 ranks with 4 threads each"),
    ],
)
def test_layouts_have_names(layout: Layout, text: str) -> None:
    assert str(layout) == text
