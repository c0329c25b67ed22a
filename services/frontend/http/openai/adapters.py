"""POST /v1/load_lora_adapter and POST /v1/unload_lora_adapter, in the form of vLLM: the bodies, the
answers and the handlers."""

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from services.common import errors
from services.common.adapter_sources import MAX_SOURCE_BYTES
from services.frontend.api_keys import Account
from services.frontend.http.bodies.object_kinds import ExactModel
from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.api import Api

Name = Annotated[str, Field(min_length=1, max_length=128)]


class LoadAdapterBody(ExactModel):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: Name
    """Name by which requests select the adapter. It must be no name of a model or of another
    adapter."""
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_SOURCE_BYTES)]
    """Directory of the adapter on the workers' machines. It must be below a directory in the
    workers' setting `allowed_adapter_sources`."""
    base_model_name: str | None = None
    """Name of the model that the adapter changes; may be left out if the caller may use only
    one."""


class UnloadAdapterBody(ExactModel):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: Name
    """Name of the adapter."""


@answer_object
class AdapterDone(TypedDict):
    """The answer to a request to load or to unload an adapter."""

    object: Literal["adapter"]
    """Always `adapter`."""
    id: str
    """Name of the adapter."""
    is_loaded: bool
    """Whether requests may use the adapter now."""


async def load_lora_adapter(api: Api, body: LoadAdapterBody, account: Account) -> AdapterDone:
    """Loads an adapter, and returns when requests may use it.

    Raises:
        PermissionDenied: the workers' settings allow no adapters.
        InvalidRequest: the name is taken, or the adapter cannot be loaded.
        UnknownModel: no model that the caller may use has the name `base_model_name`.
    """
    model = api.models.with_base(body.base_model_name or "", account)
    if not model.service.describe().loads_adapters:
        raise errors.PermissionDenied(
            "adapters cannot be loaded: the workers' setting allowed_adapter_sources is empty"
        )
    if api.models.is_taken(body.lora_name, model):
        raise errors.InvalidRequest(
            "lora_name", "is the name of a model, or of an adapter of another model"
        )
    await model.scheduler.adapters.load(body.lora_name, body.lora_path)
    return {"object": "adapter", "id": body.lora_name, "is_loaded": True}


async def unload_lora_adapter(api: Api, body: UnloadAdapterBody, account: Account) -> AdapterDone:
    """Unloads an adapter. Running requests that use it finish, and waiting requests fail.

    Raises:
        UnknownAdapter: no model that the caller may use has an adapter of this name.
    """
    model = api.models.with_adapter(body.lora_name, account)
    await model.scheduler.adapters.unload(body.lora_name)
    return {"object": "adapter", "id": body.lora_name, "is_loaded": False}
