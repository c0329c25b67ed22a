"""The report about a checkpoint keeps what it says as JSON, and has one line for each fact."""

import json

from services.common.checkpoint_report import CheckpointReport
from services.common.derived import Derived

REPORT = CheckpointReport(
    {"context": Derived(131072, "config.json"), "ends of turn": Derived((2, 7), "two files")},
    {"not quantised": ["mlp.gate"], "4 bits in groups of 16": ["mlp.up_proj"]},
    {"tensors": ["a", "b", "c", "d", "e", "f"]},
)


def test_a_report_has_a_row_for_each_fact() -> None:
    assert REPORT.rows() == [
        ("context", "131,072 (config.json)"),
        ("ends of turn", "2, 7 (two files)"),
        ("matrices", "not quantised: mlp.gate"),
        ("matrices", "4 bits in groups of 16: mlp.up_proj"),
        ("ignored", "tensors: a, b, c, d and 2 more"),
    ]


def test_matrices_of_one_form_need_no_row() -> None:
    assert CheckpointReport(layers={"not quantised": ["mlp.gate"]}).rows() == []


def test_rows_are_short_however_much_there_is_to_say() -> None:
    ends = Derived(tuple(range(10_000)), "x" * 10_000)
    tensors = [f"model.vision.{i}" for i in range(10_000)]
    report = CheckpointReport({"ends of turn": ends}, ignored={"tensors": tensors})
    assert len(json.dumps(report.rows())) < 1200


def test_a_report_travels_as_json() -> None:
    assert CheckpointReport.of_facts(json.loads(json.dumps(REPORT.facts()))).rows() == REPORT.rows()
