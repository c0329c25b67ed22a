"""The model of costs is what it says, and what is read from curves is on them."""

import pytest

from benchmarks.paper.fit import ALL_PAIRS, NO_PAIRS, batch_s, errors, fit, rms
from benchmarks.paper.gpu_costs import Gpu, GpuCosts
from benchmarks.paper.models import MODELS
from benchmarks.paper.published import FIGURE_10, HEADLINE_PER_S
from benchmarks.paper.sweep import Run, latency_at, middle_throughput, run, throughput_at
from benchmarks.paper.systems import scheduling
from simulator.costs import IterationWork
from simulator.outcome import RequestTimes
from simulator.workload import mixed_lengths

GPU = Gpu(
    layer_s=1e-4,
    bandwidth=1e12,
    products=1e14,
    request_s=1e-6,
    pair_s=1e-9,
    sync_s=1e-2,
)


def test_the_models_have_the_sizes_of_their_names() -> None:
    for name, model in MODELS.items():
        n_weights = model.n_layers * model.n_layer_weights
        assert n_weights == pytest.approx(float(name[:-1]) * 1e9, rel=0.04)
        assert 0 < model.n_slots * model.slot_bytes < 40e9 * model.n_gpus


def test_stages_take_as_long_as_their_layers() -> None:
    model = MODELS["341B"]
    costs = GpuCosts(model, GPU)
    work = IterationWork.of([(99, 1, True)] * 4)
    weights_s = 2 * 12 * model.hidden_size**2 / 8 / 1e12
    keys_s = 4 * 100 * (4 * model.hidden_size / 8) / 1e12
    layer_s = 1e-4 + weights_s + 4e-6 + keys_s
    assert costs.stage_s(0, work) == pytest.approx(30 * layer_s + 1e-2)
    assert costs.stage_s(3, work) == pytest.approx(30 * layer_s)
    assert costs.iteration_s(work) == pytest.approx(120 * layer_s + 1e-2)


def test_long_prompts_take_the_time_of_their_products() -> None:
    costs = GpuCosts(MODELS["13B"], Gpu(0.0, 1e12, 1e14, 0.0, 0.0))
    short, long = (costs.iteration_s(IterationWork.of([(0, n, True)])) for n in (1000, 2000))
    assert long > 1.9 * short
    assert costs.iteration_s(IterationWork.of([(0, 2, True)])) == pytest.approx(
        costs.iteration_s(IterationWork.of([(0, 1, True)])), rel=1e-3
    )


def test_a_batch_is_a_prefill_and_its_decodes() -> None:
    costs = GpuCosts(MODELS["101B"], GPU)
    expected = costs.iteration_s(IterationWork.of([(0, 5, True)] * 2))
    expected += sum(costs.iteration_s(IterationWork.of([(5 + i, 1, True)] * 2)) for i in range(2))
    assert batch_s(costs, 2, 5, n_output=3) == pytest.approx(expected)


def test_each_pair_of_a_prompt_takes_its_time_in_each_head() -> None:
    one, other = (
        GpuCosts(MODELS["13B"], Gpu(0.0, 1e12, 1e14, 0.0, pair_s)) for pair_s in (0, 1e-9)
    )
    prompt, decode = IterationWork.of([(0, 8, True)]), IterationWork.of([(7, 1, True)])
    added_s = other.iteration_s(prompt) - one.iteration_s(prompt)
    assert added_s == pytest.approx(40 * 40 * 36 * 1e-9)  # layers, heads, pairs
    assert other.iteration_s(decode) == one.iteration_s(decode)


@pytest.mark.parametrize("kind", [NO_PAIRS, ALL_PAIRS])
def test_the_fit_is_as_good_as_it_is_said_to_be(kind: str) -> None:
    engines = fit(kind)
    assert rms([error for _, error in errors(engines)]) < 0.04
    assert engines["ft"].sync_s > 0


def test_the_headline_is_that_of_the_abstract() -> None:
    orca, ft = HEADLINE_PER_S.values()
    assert orca / ft == pytest.approx(36.9, abs=0.15)
    assert (orca, 193) in FIGURE_10["175B"]["orca(32)"]


CURVE = [(1.0, 10.0), (2.0, 20.0), (2.5, 120.0)]


def test_values_are_read_between_points() -> None:
    assert throughput_at(CURVE, 5.0) is None
    assert throughput_at(CURVE, 15.0) == pytest.approx(1.5)
    assert throughput_at(CURVE, 500.0) == 2.5
    assert latency_at(CURVE, 0.5) == 10.0
    assert latency_at(CURVE, 2.25) == pytest.approx(70.0)
    assert latency_at(CURVE, 3.0) is None


def test_throughput_is_that_of_the_middle_half() -> None:
    ends_s = [0.0, 0.1, 1.0, 3.0, 5.0, 7.0, 90.0, 99.0]
    requests = [RequestTimes(0.0, 0.0, end_s, 1) for end_s in reversed(ends_s)]
    assert middle_throughput(requests) == pytest.approx(4 / 89.0)


@pytest.mark.parametrize("system", ["orca(4)", "ft(4,2)", "ft(4)", "cellular(4)"])
def test_systems_keep_up_with_little(system: str) -> None:
    lengths = mixed_lengths(40, seed=1)
    throughput, latency_ms = run(Run("175B", system, 0.01, lengths), {"orca": GPU, "ft": GPU})
    assert throughput == pytest.approx(0.01, rel=0.3)
    assert latency_ms > 1e3 * GpuCosts(MODELS["175B"], GPU).iteration_s(
        IterationWork.of([(0, 1, True)])
    )


def test_a_system_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no system 'orka"):
        scheduling("orka(1)", MODELS["13B"])
    with pytest.raises(ValueError, match="do not fit"):
        scheduling("ft(8,8)", MODELS["13B"])
