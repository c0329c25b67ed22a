"""The orders, by their names in the setting `order`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self

from services.scheduler.core.order.fair import Fair
from services.scheduler.core.order.fcfs import FirstComeFirstServed
from services.scheduler.core.order.order import Clock, Order, OrderOptions


class NamedOrder(Order, Protocol):
    """An order that can be created from settings."""

    name: ClassVar[str]
    """The value of the setting `order`."""
    heeds_clients: ClassVar[bool]
    """Whether the order depends on the priorities and clients of requests."""

    @classmethod
    def of(cls, options: OrderOptions, now: Clock) -> Self:
        """Returns an order without requests. `now` is its clock."""
        ...

    @property
    def options(self) -> OrderOptions:
        """The options with which the order was made. Options that the order does not use have
        defaults."""
        ...


_ORDERS: tuple[type[NamedOrder], ...] = (FirstComeFirstServed, Fair)

ORDERS: Mapping[str, type[NamedOrder]] = {order.name: order for order in _ORDERS}


def named_order(order: Order) -> NamedOrder | None:
    """Returns the order itself if the settings have a name for its class. Returns None
    otherwise."""
    return next((order for kind in _ORDERS if isinstance(order, kind)), None)


if TYPE_CHECKING:
    OrderName = str
else:
    OrderName = Literal[tuple(ORDERS)]
"""Type of the setting `order`: the name of an order. Settings refuse any other value."""
