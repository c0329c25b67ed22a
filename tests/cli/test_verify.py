"""The options and the exit status of `orcinus verify`; `tests/system` runs the whole."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.cli.local_system import DoesNotServe, LocalAddresses
from services.cli.verify import UNCHECKED, keys_at, layout_of, main, prompts_in, status_of
from services.verify.receipt_files import FoundReceipt
from services.verify.verdict import Outcome, Signature, Verdict
from tests.receipts.made import ARITHMETIC, KEYS, signed

SAME, DIFFERS = Outcome.SAME, Outcome.DIFFERS


def verdict(outcome: Outcome, signature: Signature = Signature.VALID) -> Verdict:
    return Verdict(place="f:1", outcome=outcome, signature=signature)


def test_one_wrong_receipt_counts_more_than_one_that_cannot_be_checked() -> None:
    good, unchecked = verdict(SAME), verdict(Outcome.UNCHECKED)
    unsigned = verdict(SAME, Signature.UNCHECKED)
    assert status_of([good, unsigned]) == 0
    assert status_of([good, unchecked]) == UNCHECKED
    assert status_of([unchecked, verdict(DIFFERS)]) == 1
    assert status_of([good, verdict(SAME, Signature.WRONG)]) == 1


def test_a_system_computes_with_the_arithmetic_of_the_receipt() -> None:
    plain = (("--dtype", "float32"), ("--quantization", "none"), ("--max-model-len", "256"))
    assert layout_of(signed()) == plain
    exact = {**ARITHMETIC, "quantization": "int4", "activations": "exact"}
    assert layout_of(signed(arithmetic=[exact]))[1:] == (
        ("--quantization", "int4"),
        ("--worker", "activations=exact"),
        ("--max-model-len", "256"),
    )
    for strange in (
        {},
        {"max_model_len": "9 --host=0.0.0.0"},
        {"max_model_len": -1},
        {"max_model_len": True},
    ):
        assert layout_of(signed(model=strange)) == plain[:-1]
    wrong: list[Any] = [[], [{}], [{"dtype": "x --host=0.0.0.0", "quantization": None}], "x", [1]]
    for nonsense in wrong:
        assert layout_of(signed(arithmetic=nonsense)) == plain[-1:]


def test_receipts_with_which_no_system_starts_are_not_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def started(options: Sequence[str]) -> Iterator[LocalAddresses]:
        if "--max-model-len=9999" in options:
            raise DoesNotServe("status 1")
        yield LocalAddresses("", "127.0.0.1:1")

    async def same(address: str, found: Sequence[FoundReceipt], **_: object) -> list[Verdict]:
        return [Verdict(place=it.place, outcome=SAME) for it in found]

    monkeypatch.setattr("services.cli.verify.serving", started)
    monkeypatch.setattr("services.cli.verify.check", same)
    file, longer = tmp_path / "receipts", signed(model={"max_model_len": 9999})
    file.write_text(f"{json.dumps(longer)}\n{json.dumps(signed())}\n{{}}\n")
    where = f"--model={tmp_path}"
    assert main([str(file), where]) == UNCHECKED
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{file}:1: cannot be checked")
    assert "no system starts with" in first
    assert others[0].startswith(f"{file}:2: same")
    file.write_text(json.dumps(longer))
    assert main([str(file), where]) == 2


def test_keys_come_from_a_set_or_from_pem(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(json.dumps(KEYS.published.to_jwks()))
    assert keys_at(str(file)).has_signed(signed())
    file.write_text("{}")
    with pytest.raises(ValueError, match='keys has no list "keys"'):
        keys_at(str(file))


def test_prompts_are_lists_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("[1, 2]\n[]\n")
    assert prompts_in(file) == [[1, 2], []]
    for wrong in ('["a"]', "[-1]", "[true]", '{"a": 1}', "["):
        file.write_text(f"[1]\n{wrong}\n")
        with pytest.raises(ValueError, match=r"line 2 is no list of tokens|Expecting"):
            prompts_in(file)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["FILE"], "one of the arguments --model --grpc is required"),
        (["FILE", "--grpc=x:1", "--model=y"], "not allowed with"),
        (["FILE", "--grpc=x:1", "--tp=2"], "unrecognized arguments: --tp=2"),
        (["FILE", "--grpc=x:1", "--at-once=0"], "no number from 1 on"),
    ],
    ids=["no system", "two systems", "unknown", "none at once"],
)
def test_wrong_options_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "further", "complaint"),
    [
        ("{}", [], "has no receipt"),
        (json.dumps(signed()), ["--keys=none"], "none: No such file"),
        (json.dumps(signed()), ["--keys=ftp://x"], "No such file"),
        (json.dumps(signed()), [], "127.0.0.1:1: "),
    ],
    ids=["no receipt", "no keys", "no URL", "no system"],
)
def test_files_and_systems_that_fail_are_named(
    tmp_path: Path,
    content: str,
    further: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "receipts.json"
    file.write_text(content)
    assert main([str(file), "--grpc=127.0.0.1:1", *further]) == 2
    assert complaint in capsys.readouterr().err
