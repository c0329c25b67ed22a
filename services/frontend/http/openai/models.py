"""Handlers of GET /v1/models and GET /v1/models/{model}."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Literal, NotRequired

from starlette.requests import Request
from typing_extensions import TypedDict

from services.common import errors
from services.frontend.api_keys import Account
from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.api import Api
from services.frontend.link.known_pipeline import ModelState
from services.frontend.models.served_model import ServedModel


@answer_object
class Model(TypedDict):
    """A name of a model, or an adapter, that requests may use."""

    id: str
    """Name of the model or of the adapter."""
    object: Literal["model"]
    """Always `model`."""
    created: int
    """Time at which the model's files were written, in seconds since 1970."""
    owned_by: str
    """Always `orcinus`."""
    parent: NotRequired[str]
    """Name of the model that the adapter changes. Left out for a model."""
    max_model_len: NotRequired[int]
    """Largest number of tokens of a prompt and its output together. Left out until the model is
    served for the first time."""
    state: ModelState
    """`serving`: requests to the model get tokens. `asleep`: no pipeline serves the model, and the
    first request starts one. `starting`: a pipeline is being started because of a request, or no
    pipeline has served the model since this server started. `unavailable`: the pipeline of the
    model was lost. Requests to a model that is not `serving` wait for a pipeline for a while."""


@answer_object
class ModelList(TypedDict):
    """The models and adapters that the caller may use. Each name of a model has an entry, and so
    has each adapter."""

    object: Literal["list"]
    """Always `list`."""
    data: list[Model]
    """One entry for each name of each model and for each adapter."""


async def list_models(api: Api, _: Request, account: Account) -> ModelList:
    """Returns the list of the models and adapters that the caller may use.

    Raises:
        Unavailable: the name of a model is not known yet.
    """
    return {"object": "list", "data": list(_entries(api, account))}


async def retrieve_model(api: Api, request: Request, account: Account) -> Model:
    """Returns the model or adapter whose name is in the path.

    Raises:
        UnknownModel: no model or adapter that the caller may use has the name.
        Unavailable: the name of a model is not known yet.
    """
    name, entries = request.path_params["model"], list(_entries(api, account))
    for entry in entries:
        if entry["id"] == name:
            return entry
    raise errors.UnknownModel(name, served=[entry["id"] for entry in entries])


def _entries(api: Api, account: Account) -> Iterator[Model]:
    """Yields an entry for each name of each model that an account may use, and for each adapter
    that the account may use.

    Raises:
        Unavailable: the name of a model is not known yet.
    """
    allowed = api.models.allowed(account)
    for model in api.models:
        for name in model.service.model_names if model in allowed else ():
            yield _entry(model, name)
        for name in api.models.adapters(model, account):
            yield _entry(model, name, parent=model.service.model_names[0])


def _entry(model: ServedModel, name: str, *, parent: str = "") -> Model:
    entry: Model = {
        "id": name,
        "object": "model",
        "created": model.service.model_created,
        "owned_by": "orcinus",
        "state": model.service.model_state,
    }
    if parent:
        entry["parent"] = parent
    with suppress(errors.Unavailable):  # no pipeline has told it yet
        entry["max_model_len"] = model.service.describe().max_model_len
    return entry
