"""Reads and sets the number of replicas of a Deployment through its `scale` subresource.

A right to that subresource allows to change the number of replicas and nothing else of the
Deployment.
"""

from typing import Any

import aiohttp
from kubernetes.aio import client

from services.scheduler.cluster.kubernetes_answer import checked
from services.scheduler.cluster.kubernetes_errors import FAILURES, explain
from services.scheduler.cluster.replicas import ReplicasUnavailable

MERGE_PATCH = "application/merge-patch+json"


class KubernetesScale:
    """A `ReplicaStore` that keeps the number of workers as the replicas of a Deployment."""

    def __init__(
        self, api: client.ApiClient, namespace: str, deployment: str, call_timeout_s: float
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._deployment = deployment
        self._call_timeout_s = call_timeout_s

    async def read(self) -> int:
        """Returns the number of replicas. Raises the errors of `ReplicaStore.read`."""
        return await self._call("GET")

    async def write(self, n_workers: int) -> None:
        """Sets the number of replicas. Raises the errors of `ReplicaStore.write`."""
        await self._call("PATCH", {"spec": {"replicas": n_workers}})

    async def _call(self, method: str, patch: dict[str, Any] | None = None) -> int:
        """Reads the number of replicas, or changes it with `patch`. Returns the number in the
        server's answer."""
        try:
            async with await self._send(method, patch) as response:
                return _n_replicas(await checked(response))
        except FAILURES as error:
            verb = "get" if patch is None else "patch"
            action = f"{verb} the scale of deployment {self._namespace}/{self._deployment}"
            raise ReplicasUnavailable(explain(action, error)) from error

    async def _send(self, method: str, patch: dict[str, Any] | None) -> aiohttp.ClientResponse:
        # To import the client's AppsV1Api takes longer than to import the scheduler.
        headers = {"Accept": "application/json"}
        request = await self._api.param_serialize(
            method,
            "/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale",
            path_params={"namespace": self._namespace, "name": self._deployment},
            query_params=[],
            header_params=headers if patch is None else headers | {"Content-Type": MERGE_PATCH},
            body=patch,
            auth_settings=["BearerToken"],
        )
        answer = await self._api.call_api(*request, _request_timeout=self._call_timeout_s)
        response: aiohttp.ClientResponse = answer.response
        return response


def _n_replicas(scale: Any) -> int:
    """Returns the number of replicas in a Scale object. A missing number means 0, because the API
    leaves a 0 out. Raises ValueError if the answer is no Scale object, because then another server
    may have answered."""
    spec = scale.get("spec") if isinstance(scale, dict) and scale.get("kind") == "Scale" else None
    n_replicas = spec.get("replicas", 0) if isinstance(spec, dict) else None
    if not isinstance(n_replicas, int):
        raise ValueError("what should be the answer of a Kubernetes API is no Scale")
    return n_replicas
