"""Orders and policies are found by the names that settings have for them, and those of installed
packages are loaded only then."""

import sys
from pathlib import Path

import pytest

from services.scheduler.building import build_order, build_policy
from services.scheduler.core.order.order import OrderOptions
from services.scheduler.core.order.registry import ORDERS
from services.scheduler.core.policies import PolicyOptions
from services.scheduler.core.policies.checked import CheckedPolicy
from services.scheduler.core.policies.registry import POLICIES, policy_of
from services.scheduler.settings import SchedulerSettings
from tests.scheduler.core.installed import install

SOURCE = """
from services.scheduler.core.order.by_key import OrderByKey
from services.scheduler.core.policies.orca import OrcaPolicy


class Own(OrcaPolicy):
    name = "own"
    api = 1


class Old(OrcaPolicy):
    name = "old"
    api = 0


class LastFirst(OrderByKey):
    name = "last_first"
    api = 1

    def key(self, request):
        return -request.arrival
"""
POINTS = """
[orcinus.policies]
own = own_policies:Own
old = own_policies:Old
renamed = own_policies:Own
missing = own_policies:Missing
chunked = own_policies:Own
nothing = own_policies:SOURCE
order = own_policies:LastFirst
[orcinus.orders]
last_first = own_policies:LastFirst
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        tmp_path, monkeypatch, points=POINTS, source=SOURCE + "SOURCE = 1\n", module="own_policies"
    )
    monkeypatch.delitem(sys.modules, "own_policies", raising=False)


@pytest.mark.parametrize("name", ORDERS)
def test_a_setting_makes_the_order_of_its_name(name: str) -> None:
    order = build_order(SchedulerSettings(n_stages=1, order=name))
    assert type(order) is ORDERS[name]
    assert order.name == name
    again = ORDERS[name].of(order.options, lambda: 0.0)
    assert again.options == order.options


@pytest.mark.parametrize("name", POLICIES)
def test_a_setting_makes_the_policy_of_its_name(name: str) -> None:
    settings = SchedulerSettings(n_stages=1, policy=name, max_batch_size=7, max_batch_tokens=70)
    policy = build_policy(settings, n_shares=2)
    assert type(policy) is POLICIES[name]
    assert (policy.name, policy.max_batch_size) == (name, 7)
    assert POLICIES[name].of(policy.options).options == policy.options


@pytest.mark.parametrize("field", ["order", "policy"])
def test_a_setting_refuses_names_that_there_are_not(field: str) -> None:
    known = ", ".join(ORDERS if field == "order" else POLICIES)
    with pytest.raises(ValueError, match=f"there is no {field} 'unheard-of'; known are {known}"):
        SchedulerSettings.model_validate({"n_stages": 1, field: "unheard-of"})


def test_options_that_an_order_does_not_heed_change_nothing() -> None:
    fcfs = ORDERS["fcfs"].of(OrderOptions(ageing_s=9.0, batch_tokens=9), lambda: 0.0)
    assert fcfs.options == OrderOptions()


@pytest.mark.parametrize("name", ["chunked", "sarathi"])
def test_chunks_need_a_budget_of_tokens(name: str) -> None:
    with pytest.raises(ValueError, match="max_batch_tokens"):
        POLICIES[name].of(PolicyOptions(max_batch_size=4))


@pytest.mark.parametrize("name", POLICIES)
def test_a_batch_has_at_least_one_request(name: str) -> None:
    with pytest.raises(ValueError, match="max_batch_size"):
        POLICIES[name].of(PolicyOptions(max_batch_size=0, max_batch_tokens=9))


@pytest.mark.usefixtures("package")
def test_a_policy_of_a_package_is_loaded_when_a_setting_names_it_and_is_checked() -> None:
    settings = SchedulerSettings(n_stages=1, policy="own", order="last_first")
    assert "own_policies" not in sys.modules
    policy = build_policy(settings, n_shares=1)
    assert isinstance(policy, CheckedPolicy)
    assert type(policy.policy).__module__ == "own_policies"
    assert (policy.name, policy.max_batch_size) == ("own", settings.max_batch_size)
    assert build_order(settings).name == "last_first"


@pytest.mark.usefixtures("package")
def test_a_name_that_there_is_not_lists_those_of_packages() -> None:
    with pytest.raises(ValueError, match="and of installed packages missing, nothing, old, order"):
        SchedulerSettings(n_stages=1, policy="unheard-of")
    assert "own_policies" not in sys.modules


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("old", "is written for version 0 of the contract, and this is version 1"),
        ("renamed", "calls itself 'own'"),
        ("missing", "cannot be loaded: "),
        ("nothing", "is no subclass of Policy"),
        ("order", "is no subclass of Policy"),
    ],
)
def test_a_class_that_breaks_the_contract_is_refused(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"policy '{name}' .*own_policies.*{why}"):
        policy_of(name, PolicyOptions(4))


@pytest.mark.usefixtures("package")
def test_no_package_replaces_a_policy_of_this_project() -> None:
    assert POLICIES["chunked"].__module__ == "services.scheduler.core.policies.chunked"
