"""The engine core computes where there is torch and numpy, and nothing of the services' edges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S
from tests.worker.engine.engine_core import CONFIG, sampled_tokens

ROOT = Path(__file__).parents[3]

# Puts a finder before all others that finds what a bare machine lacks not to be there.
BARE_MACHINE = """
import json, sys
from importlib.abc import MetaPathFinder

MISSING = (
    "annotated_types", "google.protobuf", "google.rpc", "grpc", "kubernetes",
    "opentelemetry", "orcinus", "prometheus_client", "pydantic", "pydantic_core",
    "pydantic_settings", "starlette", "tokenizers", "transformers", "uvicorn",
)

class BareMachine(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{missing}.") for missing in MISSING):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, BareMachine())
"""


def run_on_bare_machine(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BARE_MACHINE + program],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.thorough
def test_mixed_batches_run_and_are_sampled_where_the_services_are_not_installed() -> None:
    run = run_on_bare_machine(
        "from tests.worker.engine.engine_core import sampled_tokens\n"
        "print(json.dumps(sampled_tokens()))"
    )
    assert run.returncode == 0, run.stderr
    tokens = json.loads(run.stdout)
    assert [len(sampled) for sampled in tokens] == [2, 3]
    assert all(0 <= token < CONFIG.vocab_size for sampled in tokens for token in sampled)
    assert tokens == sampled_tokens()


@pytest.mark.thorough
def test_only_the_loading_of_a_checkpoint_needs_more() -> None:
    run = run_on_bare_machine(
        "import importlib\n"
        "for name in ('config_json', 'config_file', 'checkpoint'):\n"
        "    try:\n"
        "        importlib.import_module(f'services.worker.models.{name}')\n"
        "    except ModuleNotFoundError as error:\n"
        "        print(f'{name} needs {error.name}')"
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "config_json needs pydantic",
        "config_file needs google.protobuf",
        "checkpoint needs google.protobuf",
    ]
