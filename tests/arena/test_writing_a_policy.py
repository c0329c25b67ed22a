"""The page on writing a policy: its examples run, and what it names exists."""

import json
import re
from pathlib import Path

import pytest

from services.arena.__main__ import main
from services.scheduler.core.policies import Policy, PolicyOptions
from services.scheduler.core.request import Request, RequestId

PAGE = (Path(__file__).parents[2] / "docs" / "writing-a-policy.md").read_text(encoding="utf-8")
POLICY, ORDER = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)
MAX_LINES = 30


def test_the_example_of_a_policy_has_at_most_thirty_lines() -> None:
    assert len(POLICY.splitlines()) <= MAX_LINES


def test_the_examples_run_in_the_arena(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, order = tmp_path / "one_prompt.py", tmp_path / "shortest_prompt.py"
    policy.write_text(POLICY)
    order.write_text(ORDER)
    names = ("orca", str(policy), str(order), f"orca/{order}")
    options = ("--requests=40", "--machine=processor", "--load=2", "--json")
    assert main([*names, *options]) == 0
    found = {one["policy"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(found) == ["orca", "one_prompt", "shortest_prompt", "orca/shortest_prompt"]
    # What the example promises: decodes wait for one prompt at most.
    assert found["one_prompt"]["gap_p99_s"] < found["orca"]["gap_p99_s"]


def test_all_attributes_of_a_request_that_the_page_lists_exist() -> None:
    table = PAGE.partition("| of a request | |")[2].partition("\n\n")[0]
    names = re.findall(r"^\| `(\w+)`", table, flags=re.M)
    request = Request(RequestId("one"), [1, 2], 3)
    assert len(names) > 10
    assert [name for name in names if not hasattr(request, name)] == []


def test_all_parts_of_a_policy_that_the_page_lists_exist() -> None:
    table = PAGE.partition("| what a subclass has | |")[2].partition("\n\n")[0]
    first_cells = re.findall(r"^\| (.*?) \| ", table, flags=re.M)
    names = re.findall(r"`(\w+)", " ".join(first_cells))
    assert {"name", "api", "select", "keeps_order"} <= set(names)
    assert [
        name for name in names if not hasattr(Policy, name) and name not in Policy.__annotations__
    ] == []
    assert all(hasattr(PolicyOptions(1), name) for name in ("n_shares", "predictor"))
