"""Orders and policies are found by the names that settings have for them."""

import pytest

from services.scheduler.building import build_order, build_policy
from services.scheduler.core.order.order import OrderOptions
from services.scheduler.core.order.registry import ORDERS, named_order
from services.scheduler.core.policies import PolicyOptions
from services.scheduler.core.policies.registry import POLICIES, named_policy
from services.scheduler.settings import SchedulerSettings


@pytest.mark.parametrize("name", ORDERS)
def test_a_setting_makes_the_order_of_its_name(name: str) -> None:
    order = named_order(build_order(SchedulerSettings(n_stages=1, order=name)))
    assert order is not None
    assert type(order) is ORDERS[name]
    again = ORDERS[name].of(order.options, lambda: 0.0)
    assert again.options == order.options


@pytest.mark.parametrize("name", POLICIES)
def test_a_setting_makes_the_policy_of_its_name(name: str) -> None:
    settings = SchedulerSettings(n_stages=1, policy=name, max_batch_size=7, max_batch_tokens=70)
    policy = named_policy(build_policy(settings, n_shares=2))
    assert policy is not None
    assert type(policy) is POLICIES[name]
    assert policy.max_batch_size == 7
    assert POLICIES[name].of(policy.options).options == policy.options


@pytest.mark.parametrize("field", ["order", "policy"])
def test_a_setting_refuses_names_that_there_are_not(field: str) -> None:
    with pytest.raises(ValueError, match=r"Input should be '\w+' or '\w+'"):
        SchedulerSettings.model_validate({"n_stages": 1, field: "unheard-of"})


def test_options_that_an_order_does_not_heed_change_nothing() -> None:
    fcfs = ORDERS["fcfs"].of(OrderOptions(ageing_s=9.0, batch_tokens=9), lambda: 0.0)
    assert fcfs.options == OrderOptions()


def test_chunks_need_a_budget_of_tokens() -> None:
    with pytest.raises(ValueError, match="max_batch_tokens"):
        POLICIES["chunked"].of(PolicyOptions(max_batch_size=4))
