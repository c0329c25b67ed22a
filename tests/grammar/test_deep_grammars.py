"""No grammar uses up a stack, which would end the process."""

import subprocess
import sys
from pathlib import Path

import pytest

import tests

ROOT = Path(tests.__file__).parent.parent
TOKENIZER = ROOT / "models" / "demo" / "tokenizer.json"


@pytest.mark.thorough
def test_the_deepest_grammars_are_followed_or_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.grammar.deep_grammars", str(TOKENIZER)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    outcomes = done.stdout.splitlines()
    assert done.returncode == 0, (outcomes, done.stderr)
    assert outcomes[-1] == "alive"
    assert {"1000 rules: followed", "GBNF: followed"} <= set(outcomes)
    assert any(line.startswith("chain: refused: ") and "rules" in line for line in outcomes)
