"""The policies, by their names in the setting `policy`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self

from services.scheduler.core.policies import Policy, PolicyOptions
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy


class NamedPolicy(Policy, Protocol):
    """A policy that can be created from settings."""

    name: ClassVar[str]
    """The value of the setting `policy`."""
    takes_drafts: ClassVar[bool]
    """Whether the decodes of the policy's batches may carry drafts."""

    @classmethod
    def of(cls, options: PolicyOptions) -> Self:
        """Returns the policy with the given options."""
        ...

    @property
    def options(self) -> PolicyOptions:
        """The options with which the policy was made. Options that the policy does not use have
        defaults."""
        ...


_POLICIES: tuple[type[NamedPolicy], ...] = (OrcaPolicy, ChunkedPolicy)

POLICIES: Mapping[str, type[NamedPolicy]] = {policy.name: policy for policy in _POLICIES}


def named_policy(policy: Policy) -> NamedPolicy | None:
    """Returns the policy itself if the settings have a name for its class. Returns None
    otherwise."""
    return next((policy for kind in _POLICIES if isinstance(policy, kind)), None)


if TYPE_CHECKING:
    PolicyName = str
else:
    PolicyName = Literal[tuple(POLICIES)]
"""Type of the setting `policy`: the name of a policy. Settings refuse any other value."""
