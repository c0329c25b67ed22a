"""Damaged checkpoints: each is refused with the name of a file, or answers as it must.

An answer must be the one of the whole checkpoint, or what `transformers` makes of the same files.
Logits that are not finite are an error of each request, and no answer. `orcinus check` must agree,
except about values that it does not read.
"""

import shutil
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random

import pytest

from services.cli import check, inspection
from tests.fuzz.damaged import oracle
from tests.fuzz.damaged.damage import damaged
from tests.fuzz.damaged.originals import Files, any_name, original
from tests.fuzz.damaged.outcome import Answer, Refusal, answer, is_close, model_in
from tests.fuzz.rounds import N_INPUTS, SEED

N_CHECKPOINTS = max(200, N_INPUTS // 50)
"""Number of checkpoints: one takes as long as a hundred other inputs."""

MAX_REASON = 4000
"""Longest reason of a refusal, in characters."""


class Checker:
    """Writes checkpoints into a directory, and judges what becomes of each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.whole = cache(self._whole)

    def outcome(self, name: str, files: Files) -> str:
        """Returns what became of a damaged checkpoint in a word; asserts that it may."""
        model = self._write("model", files)
        found, whole = answer(model), self.whole(name)
        if not (isinstance(found, Refusal) and found.is_about_values):
            assert refused_by_check(model) == isinstance(found, Refusal), found
        if isinstance(found, Refusal):
            assert found.names_a_file, found
            assert len(found.reason) < MAX_REASON, found
            return "refused"
        if not found.logits.isfinite().all():
            return "not finite"
        has_logits = is_close(found.logits, whole.logits)
        has_tokens = (found.tokens, found.text) == (whole.tokens, whole.text)
        if not original(name).has_oracle:
            return "as it was" if has_logits and has_tokens else "not judged"
        if not has_logits:
            expected = oracle.logits(model, original(name).plain, self._write("twin", {}))
            assert is_close(found.logits, expected), f"{found}, not {expected[0, :4].tolist()}"
        if not has_tokens:
            assert (found.tokens, found.text) == oracle.tokens(model)
        return "as it was" if has_logits and has_tokens else "as transformers"

    def _whole(self, name: str) -> Answer:
        found = answer(self._write("whole", original(name).files))
        assert isinstance(found, Answer), found
        return found

    def _write(self, name: str, files: Mapping[str, bytes]) -> Path:
        directory = self._directory / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        for file, content in files.items():
            (directory / file).write_bytes(content)
        return directory


def refused_by_check(directory: Path) -> bool:
    """Whether `orcinus check` refuses a checkpoint; asserts that it can print its report."""
    model = model_in(directory)
    facts = inspection.inspect(model, inspection.parser().parse_args([str(model)]))
    lines = check.report({**facts, "model": "it"}, kv_memory=1 << 30)
    assert lines[0] == f"it can{'not' if facts['refused'] else ''} be served"
    return bool(facts["refused"])


def test_a_damaged_checkpoint_is_refused_or_right(tmp_path: Path) -> None:
    checker, outcomes = Checker(tmp_path), Counter[str]()
    for number in range(N_CHECKPOINTS):
        dice = Random(f"{SEED}-{number}")
        name = any_name(dice)
        what, files = damaged(original(name), dice)
        try:
            outcomes[checker.outcome(name, files)] += 1
        except BaseException as error:  # noqa: BLE001 (of any kind: it is what the test looks for)
            pytest.fail(f"FUZZ_SEED={SEED}, {number}: {name}, {what}: {error!r}")
    print(f"\ncheckpoints: {outcomes.total()}, FUZZ_SEED={SEED}: {dict(outcomes)}")
