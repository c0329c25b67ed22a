"""The number of workers that there should be, and the interface of the store of this number. This
module does not depend on Kubernetes. In a cluster, the number of replicas of a Deployment is the
store."""

from typing import Protocol


class ReplicasUnavailable(Exception):
    """Raised when the store did not answer or refused a call; another attempt may succeed."""


class ReplicaStore(Protocol):
    """A store of the number of workers that there should be."""

    async def read(self) -> int:
        """Returns the number of workers that there should be.

        Raises:
            ReplicasUnavailable: the number could not be read.
        """
        ...

    async def write(self, n_workers: int) -> None:
        """Sets the number of workers that there should be.

        Raises:
            ReplicasUnavailable: the call failed. The number may have been set or not.
        """
        ...
