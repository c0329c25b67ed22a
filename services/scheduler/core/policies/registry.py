"""The policies, by the names that the setting `policy` has for them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self

from services.scheduler.core.policies import Policy, PolicyOptions
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy


class NamedPolicy(Policy, Protocol):
    """A policy that is made of settings."""

    name: ClassVar[str]
    """The value of the setting `policy`."""
    takes_drafts: ClassVar[bool]
    """Whether its decodes may carry drafts."""

    @classmethod
    def of(cls, options: PolicyOptions) -> Self:
        """Returns the policy with these options."""
        ...

    @property
    def options(self) -> PolicyOptions:
        """The options with which the policy was made, as far as it heeds them."""
        ...


_POLICIES: tuple[type[NamedPolicy], ...] = (OrcaPolicy, ChunkedPolicy)

POLICIES: Mapping[str, type[NamedPolicy]] = {policy.name: policy for policy in _POLICIES}


def named_policy(policy: Policy) -> NamedPolicy | None:
    """Returns a policy if settings have a name for it, else None."""
    return next((policy for kind in _POLICIES if isinstance(policy, kind)), None)


if TYPE_CHECKING:
    PolicyName = str
else:
    PolicyName = Literal[tuple(POLICIES)]
"""A name of a policy; settings refuse any other."""
