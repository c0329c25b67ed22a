"""The orders, by the names that the setting `order` has for them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self

from services.scheduler.core.order.fair import Fair
from services.scheduler.core.order.fcfs import FirstComeFirstServed
from services.scheduler.core.order.order import Clock, Order, OrderOptions


class NamedOrder(Order, Protocol):
    """An order that is made of settings."""

    name: ClassVar[str]
    """The value of the setting `order`."""
    heeds_clients: ClassVar[bool]
    """Whether requests come by their priorities and clients."""

    @classmethod
    def of(cls, options: OrderOptions, now: Clock) -> Self:
        """Returns an order without requests; `now` is its clock."""
        ...

    @property
    def options(self) -> OrderOptions:
        """The options with which the order was made, as far as it heeds them."""
        ...


_ORDERS: tuple[type[NamedOrder], ...] = (FirstComeFirstServed, Fair)

ORDERS: Mapping[str, type[NamedOrder]] = {order.name: order for order in _ORDERS}


def named_order(order: Order) -> NamedOrder | None:
    """Returns an order if settings have a name for it, else None."""
    return next((order for kind in _ORDERS if isinstance(order, kind)), None)


if TYPE_CHECKING:
    OrderName = str
else:
    OrderName = Literal[tuple(ORDERS)]
"""A name of an order; settings refuse any other."""
