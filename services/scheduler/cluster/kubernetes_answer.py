"""Reads the answer to a call of the Kubernetes API that was made without the models of the official
client."""

import json
from http import HTTPStatus
from typing import Any

import aiohttp
from kubernetes.aio import client


async def checked(response: aiohttp.ClientResponse) -> Any:
    """Returns the parsed JSON of an answer.

    Raises:
        ApiException: the answer reports an error.
        ValueError: the answer is not JSON.
    """
    text = await response.text()
    if response.status != HTTPStatus.OK:
        raise client.ApiException(response.status, response.reason, body=text)
    return json.loads(text)
