"""The policies, by their names in the setting `policy`."""

from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

from services.scheduler.core.plugins import Registry
from services.scheduler.core.policies import POLICY_API, Policy, PolicyOptions
from services.scheduler.core.policies.aging import AgingPolicy
from services.scheduler.core.policies.batchmaker import BatchMakerPolicy
from services.scheduler.core.policies.checked import CheckedPolicy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.faster_transformer import FasterTransformerPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.policies.request_level import RequestLevelPolicy
from services.scheduler.core.policies.sarathi import SarathiPolicy
from services.scheduler.core.policies.shortest import ShortestPolicy

POLICIES: Registry[Policy] = Registry(
    Policy,  # type: ignore[type-abstract]
    "policy",
    group="orcinus.policies",
    api=POLICY_API,
    built_in=(
        ChunkedPolicy,
        OrcaPolicy,
        SarathiPolicy,
        ShortestPolicy,
        AgingPolicy,
        RequestLevelPolicy,
        BatchMakerPolicy,
        FasterTransformerPolicy,
    ),
)


def policy_of(name: str, options: PolicyOptions) -> Policy:
    """Returns the policy with the name `name` and the given options. If the policy is not one of
    this project, its selections are checked, because the scheduler and its clients depend on them.

    Raises:
        ValueError: there is no such policy, it does not follow the contract, or it cannot have
            these options.
    """
    kind = POLICIES[name]
    if name in POLICIES:
        return kind.of(options)
    try:
        return CheckedPolicy(kind.of(options))
    except Exception as error:  # a policy of another project may raise anything
        raise ValueError(f"policy {name!r} cannot be made: {error!r}") from error


PolicyName = Annotated[
    str,
    AfterValidator(POLICIES.check),
    WithJsonSchema({"type": "string", "enum": list(POLICIES)}),
]
"""Type of the setting `policy`: the name of a policy. Settings refuse any other value."""
