"""All models that this frontend serves: finds the model that a call is for, and tells whether the
frontend as a whole takes requests.

A caller sees only the models that its API key allows. A model that the key does not allow is
treated as one that is not served here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager

from services.common import errors
from services.common.process import first_of
from services.frontend.api_keys import Account
from services.frontend.generation.admission import Admission
from services.frontend.generation.generation import Generation
from services.frontend.models.served_model import ServedModel
from services.frontend.request.generation_request import GenerationRequest


class ServedModels:
    """The models of this frontend, in the order of the settings."""

    def __init__(self, models: Sequence[ServedModel], admission: Admission) -> None:
        """`models` has at least one model. If there are several, the settings name each of
        them."""
        self._models = tuple(models)
        self._admission = admission

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def allowed(self, account: Account) -> tuple[ServedModel, ...]:
        """Returns the models that an account may use."""
        return tuple(model for model in self._models if account.may_use(model.names))

    def select(self, name: str, account: Account) -> ServedModel:
        """Returns the model that a call is for. `name` is a name of the model or of one of its
        adapters, and may be empty if the account may use only one model. If the frontend has only
        one model, and the account may use it, that model is returned whatever the name is. The
        service of the model checks the name later, because the model's name may be known only from
        the pipeline.

        Raises:
            InvalidRequest: the name is empty, and the account may use several models.
            UnknownModel: no model or adapter that the account may use has the name.
        """
        allowed = self.allowed(account)
        if allowed and len(self._models) == 1:
            return self._models[0]
        for model, adapter in self._adapters_alone(account):
            if adapter == name:
                return model
        if not name and len(allowed) > 1:
            raise errors.InvalidRequest(
                "model", f"must be given; served here: {errors.listed(_names(allowed))}"
            )
        for model in allowed:
            if not name or name in model.names:
                return model
        for model in allowed:
            if name in model.service.adapters:
                return model
        alone = [adapter for _, adapter in self._adapters_alone(account)]
        raise errors.UnknownModel(name, served=[*_names(allowed), *alone])

    def adapters(self, model: ServedModel, account: Account) -> tuple[str, ...]:
        """Returns the adapters of a model that an account may use. If the account may use the
        model, these are all adapters of the model, else only the adapters that the account's API
        key names."""
        names = model.service.adapters
        if account.may_use(model.names):
            return names
        return tuple(name for name in names if account.may_use((name,)))

    def _adapters_alone(self, account: Account) -> Iterator[tuple[ServedModel, str]]:
        """Yields the adapters that an account may use although it may not use the adapter's model.
        Each item is the model and the name of the adapter."""
        for model in self._models:
            if not account.may_use(model.names):
                for name in self.adapters(model, account):
                    yield model, name

    def with_base(self, name: str, account: Account) -> ServedModel:
        """Returns the model to which an adapter is to be added. `name` is a name of the model, and
        may be empty if the account may use only one model.

        Raises:
            InvalidRequest: the name is empty, and the account may use several models.
            UnknownModel: no model that the account may use has the name.
        """
        allowed = self.allowed(account)
        if not name and len(allowed) > 1:
            raise errors.InvalidRequest(
                "base_model_name", f"must be given; served here: {errors.listed(_names(allowed))}"
            )
        for model in allowed:
            if not name or name in model.names:
                return model
        raise errors.UnknownModel(name, served=_names(allowed))

    def is_taken(self, name: str, model: ServedModel) -> bool:
        """Returns whether a model of this frontend has the name `name`, or a model other than
        `model` has an adapter of this name. The scheduler of `model` checks the adapters of `model`
        itself."""
        return any(
            name in one.names or (one is not model and name in one.service.adapters)
            for one in self._models
        )

    def with_adapter(self, name: str, account: Account) -> ServedModel:
        """Returns the model that has the adapter `name`.

        Raises:
            UnknownAdapter: no model that the account may use has an adapter of this name.
        """
        for model in self.allowed(account):
            if name in model.service.adapters:
                return model
        raise errors.UnknownAdapter("lora_name", f"{errors.shortened(name)!r} is no adapter here")

    def check_room(self, account: Account) -> None:
        """Checks that there is room for a new call, as far as that is known before the call is
        read. With several models, the model of the call is not known yet, so only the limits of the
        whole frontend are checked. Calls that resume a broken stream need no check.

        Raises:
            PoolFull: there is no room for a new call at the moment.
            Unavailable: this process is stopping.
        """
        if len(self._models) == 1:
            self._models[0].service.check_room(account)
        else:
            self._admission.check_room()

    def open(
        self, request: GenerationRequest, account: Account
    ) -> AbstractAsyncContextManager[Generation]:
        """Does what `GenerationService.open` does, with the model that the request names.

        Raises:
            InvalidRequest: the request names no model, and the account may use several.
            UnknownModel: no model that the account may use has the name.
        """
        return self._selected(request, account).service.open(request, account)

    def prepare(
        self, request: GenerationRequest, account: Account
    ) -> AbstractAsyncContextManager[Generation]:
        """Does what `GenerationService.prepare` does, with the model that the request names.

        Raises:
            InvalidRequest: the request names no model, and the account may use several.
            UnknownModel: no model that the account may use has the name.
        """
        return self._selected(request, account).service.prepare(request, account)

    def _selected(self, request: GenerationRequest, account: Account) -> ServedModel:
        model = self.select(request.model, account)
        if len(self._models) > 1 and request.resumption is None:
            model.service.check_room(account)  # the call was read without knowing its model
        return model

    @property
    def takes_requests(self) -> bool:
        """Whether new requests to at least one model are served."""
        return any(model.service.takes_requests for model in self._models)

    @property
    def is_ready(self) -> bool:
        """Whether requests should be sent to this frontend. A frontend that is shutting down still
        serves requests, but load balancers should choose another."""
        return self.takes_requests and not self._admission.is_leaving

    async def wait_taking(self, takes_requests: bool) -> None:
        """Waits until the property `takes_requests` has the given value. A call of
        `Admission.refuse_new` does not end the wait."""
        while self.takes_requests is not takes_requests:
            waits = [model.service.wait_taking(takes_requests) for model in self._models]
            if takes_requests:
                await first_of(*waits)
            else:
                await asyncio.gather(*waits)

    def reason_against_serving(self) -> str:
        """Returns the reason why no model gives tokens to new requests. The result is empty if at
        least one model does. May be called from any thread."""
        reasons = [model.watch.reason_against() for model in self._models]
        if not all(reasons):
            return ""
        return reasons[0] if len(reasons) == 1 else f"none of {len(reasons)} models: {reasons[0]}"

    async def run(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """Keeps the links to all schedulers open until cancelled. `tell` is called about twice a
        second with whether new requests get tokens."""

        async def tell_all(_: bool) -> None:
            await tell(not self.reason_against_serving())

        async with asyncio.TaskGroup() as tasks:
            for model in self._models:
                tasks.create_task(model.run(tell_all))

    def end_viewers(self) -> None:
        """Ends the streams of all viewers, and takes no more viewers."""
        for model in self._models:
            model.feed.close()

    def close(self) -> None:
        """Ends all requests with the error Unavailable, and refuses new ones."""
        for model in self._models:
            model.scheduler.close()


def _names(models: Sequence[ServedModel]) -> list[str]:
    """Returns, for each model, the name that its answers show."""
    return [model.names[0] for model in models]
