"""Handlers of GET /v1/models and GET /v1/models/{model}."""

from typing import Literal

from starlette.requests import Request
from typing_extensions import TypedDict

from services.common import errors
from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.api import Api
from services.frontend.link.known_pipeline import ModelState


@answer_object
class Model(TypedDict):
    """The model that is served."""

    id: str
    """Name of the model."""
    object: Literal["model"]
    """Always `model`."""
    created: int
    """Time at which the model's files were written, in seconds since 1970."""
    owned_by: str
    """Always `orcinus`."""
    max_model_len: int
    """Largest number of tokens of a prompt and its output together."""
    state: ModelState
    """`serving`: requests to the model get tokens. `asleep`: no pipeline serves the model, and the
    first request starts one. `starting`: one is being started because of a request, or none has
    served the model since this server started. `unavailable`: the pipeline of the model was lost.
    Requests to a model that is not `serving` wait for a pipeline for a while."""


@answer_object
class ModelList(TypedDict):
    """The list of models that the server offers. Each name of the one served model is an entry."""

    object: Literal["list"]
    """Always `list`."""
    data: list[Model]
    """One entry for each name of the served model."""


async def list_models(api: Api, _: Request) -> ModelList:
    """Returns the list of models. Each name of the one served model is an entry."""
    return {"object": "list", "data": [_model(api, name) for name in api.service.model_names]}


async def retrieve_model(api: Api, request: Request) -> Model:
    """Returns the served model, if the path contains one of its names.

    Raises:
        UnknownModel: the name in the path is not a name of the served model.
    """
    name, names = request.path_params["model"], api.service.model_names
    if name not in names:
        raise errors.UnknownModel(name, served=names[0])
    return _model(api, name)


def _model(api: Api, name: str) -> Model:
    return {
        "id": name,
        "object": "model",
        "created": api.service.model_created,
        "owned_by": "orcinus",
        "max_model_len": api.service.describe().max_model_len,
        "state": api.service.model_state,
    }
