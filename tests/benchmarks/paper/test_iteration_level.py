"""Comparisons at equal latency: interpolation, and what the ladder says."""

from pathlib import Path

import pytest

from benchmarks import records
from benchmarks.paper.iteration_level import compare, parse, run, throughput_at
from benchmarks.plots import Point

CURVE = [Point(1.0, 0.01), Point(2.0, 0.02), Point(3.0, 0.08)]


@pytest.mark.parametrize(
    ("level_s", "expected"),
    [
        pytest.param(0.005, None, id="never"),
        pytest.param(0.01, 1.0, id="at the first"),
        pytest.param(0.02, 2.0, id="at a point"),
        pytest.param(0.04, 2.5, id="half way up the logarithm"),
        pytest.param(1.0, 3.0, id="beyond the last"),
    ],
)
def test_throughput_is_interpolated(level_s: float, expected: float | None) -> None:
    found = throughput_at(CURVE, level_s)
    assert found == (None if expected is None else pytest.approx(expected))


def test_a_variant_without_points_has_no_throughput() -> None:
    assert throughput_at([], 1.0) is None


def test_the_first_crossing_counts_where_a_curve_bends_back() -> None:
    curve = [Point(1.0, 0.01), Point(2.0, 0.04), Point(1.8, 0.02)]
    assert throughput_at(curve, 0.02) == pytest.approx(1.5)


def test_steps_multiply_to_the_ratio_and_shares_add_up() -> None:
    curves = {
        "request level": [Point(1.0, 0.1)],
        "selective": [Point(2.0, 0.1)],
        "chunked": [Point(4.0, 0.1)],
        "microbatch": [Point(0.5, 0.1)],
        "padded": [Point(0.5, 0.9)],
    }
    header, *lines = [line.split() for line in compare(curves, 0.1)]
    assert header[-5:] == ["variant", "req/s", "ratio", "step", "share"]
    assert lines == [
        ["request", "level", "1.00", "1.00"],
        ["selective", "2.00", "2.00", "2.00", "50", "%"],
        ["chunked", "4.00", "4.00", "2.00", "50", "%"],
        ["microbatch", "0.50", "0.50"],
        ["padded", "never", "that", "fast"],
    ]


def test_quick_is_small() -> None:
    options = parse(["--quick"])
    assert options.shape == "llama-tiny"
    assert options.requests * len(options.rates) < 20


@pytest.mark.system
@pytest.mark.thorough
async def test_whole_systems_are_measured_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, figure = tmp_path / "runs.json", tmp_path / "figure.png"
    arguments = ["--quick", f"--out={out}", f"--figure={figure}", "--threads=1"]
    await run(parse([*arguments, "--stop-at=inf", "--variants", "request level", "padded"]))
    runs = records.read(out)
    assert [(each.meta["variant"], each.meta["rate"]) for each in runs] == [
        ("request level", 20.0),
        ("request level", 60.0),
        ("padded", 20.0),
        ("padded", 60.0),
    ]
    lengths = [[(r.n_prompt, r.n_output) for r in each.requests] for each in runs]
    assert lengths == [lengths[0]] * 4
    assert all(each.summary().n_failed == 0 for each in runs)
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("request level") == 2 + 2
