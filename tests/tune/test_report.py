"""What the tuner writes is what services take, and it says why."""

import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from services.common.by_model import for_all
from services.local.settings import LocalSettings
from services.tune.check import Check
from services.tune.choice import Tuned
from services.tune.reasons import reasons
from services.tune.report import command, make_directory, table, write
from services.tune.settings import TuneSettings
from simulator.outcome import LatencyLimits
from tests.k8s.manifests import K8S, Manifests, environment, render_directory
from tests.tune.cases import candidate, tuned

DEMO = Path(__file__).parents[2] / "models" / "demo"


@pytest.fixture
def settings(tmp_path: Path) -> TuneSettings:
    return TuneSettings(model=DEMO, out=tmp_path / "new" / "out", worker=(("block-size", "8"),))


def test_the_local_launcher_takes_the_variables(
    settings: TuneSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tuned()
    env_file, _ = write(settings, found)
    for line in env_file.read_text().splitlines():
        if not line.startswith("#"):
            name, value = shlex.split(line)[0].split("=", 1)
            monkeypatch.setenv(name, value)
    local = LocalSettings.load("local", [])
    candidate = found.chosen.candidate
    assert local.model == for_all(DEMO.resolve())
    assert (local.stages, local.tp, local.threads) == (1, 1, 2)
    assert local.max_batch_size == candidate.max_batch_size
    assert local.max_batch_tokens == candidate.max_batch_tokens
    assert (local.kv_memory, local.worker) == (2**26, (("block-size", "8"),))


def test_the_local_launcher_takes_the_command(settings: TuneSettings) -> None:
    found = tuned()
    local = LocalSettings.load("local", shlex.split(command(settings, found))[3:])
    assert local.max_batch_tokens == found.chosen.candidate.max_batch_tokens
    assert local.kv_memory == 2**26


def test_an_overlay_takes_the_component(settings: TuneSettings, tmp_path: Path) -> None:
    found = tuned()
    _, component_file = write(settings, found)
    overlay = tmp_path.resolve() / "overlay"
    overlay.mkdir()
    to_k8s = os.path.relpath(K8S, overlay)
    to_found = os.path.relpath(component_file.parent.resolve(), overlay)
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"{to_k8s}/base"],
        "components": [to_found, f"{to_k8s}/components/stages"],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    manifests = Manifests(list(yaml.safe_load_all(render_directory(overlay))))
    candidate = found.chosen.candidate
    assert manifests.workload("worker").n_pods == 1  # and not the two of base
    of_scheduler = environment(manifests, manifests.workload("scheduler"))
    assert of_scheduler["ORCINUS_MAX_BATCH_SIZE"] == str(candidate.max_batch_size)
    assert of_scheduler["ORCINUS_MAX_BATCH_TOKENS"] == str(candidate.max_batch_tokens)
    of_worker = environment(manifests, manifests.workload("worker"))
    assert of_worker["ORCINUS_KV_MEMORY"] == str(2**26)
    assert (of_worker["ORCINUS_TP_SIZE"], of_worker["ORCINUS_N_THREADS"]) == ("1", "2")


def test_the_table_begins_with_the_chosen_and_has_what_was_measured() -> None:
    found = tuned()
    header, first, *others = table(found, "tokens/s")
    assert "predicted tokens/s" in header
    assert first.startswith(f"* {found.chosen.candidate}")
    assert f"{0.9 * found.chosen.value:.4g}" in first
    assert [line for line in others if "(a part)" in line]


def test_a_place_where_nothing_can_be_written_is_refused() -> None:
    with pytest.raises(OSError, match="/dev/null"):
        make_directory(TuneSettings(model=DEMO, out=Path("/dev/null/out")))


def test_it_says_what_was_measured_beside_the_defaults() -> None:
    found = tuned()
    default = candidate(32, 512)
    better = candidate(16, 256)
    chosen = replace(found.chosen, candidate=better)
    checks = {better: Check(120.0, True, ()), default: Check(100.0, True, ())}
    assert "Measured: 1.20 x what the defaults do" in said(
        replace(found, chosen=chosen, checks=checks)
    )
    of_default = replace(found, chosen=replace(chosen, candidate=default), checks=checks)
    assert "These are the defaults: of 2 settings" in said(of_default)
    assert "Predicted only" in said(replace(found, checks={}))


def test_it_says_how_limits_are_kept() -> None:
    found = tuned()
    chosen = replace(found.chosen, rate=3.0)
    text = said(replace(found, chosen=chosen, limits=LatencyLimits(ttft_s=1e6)))
    assert re.search(r"At 3 requests/s, 100% should keep the limits; .* token in \d.* s, and", text)


def said(found: Tuned) -> str:
    return "\n".join(reasons(found))


def test_every_setting_and_every_layout_has_a_reason() -> None:
    found = tuned()
    text = "\n".join(reasons(found))
    for name in ("max_batch_size", "max_batch_tokens", "kv_memory"):
        assert re.search(rf"^{name} \d+", text, flags=re.M)
    assert re.search(r"^2 stages with 1 thread each: \d+\.\d% less at its best", text, flags=re.M)
    assert "4 stages: there was no time" in text
