"""The orders, by their names in the setting `order`."""

from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

from services.scheduler.core.order.fair import Fair
from services.scheduler.core.order.fcfs import FirstComeFirstServed
from services.scheduler.core.order.order import ORDER_API, Order
from services.scheduler.core.plugins import Registry

ORDERS: Registry[Order] = Registry(
    Order,  # type: ignore[type-abstract]
    "order",
    group="orcinus.orders",
    api=ORDER_API,
    built_in=(FirstComeFirstServed, Fair),
)

OrderName = Annotated[
    str,
    AfterValidator(ORDERS.check),
    WithJsonSchema({"type": "string", "enum": list(ORDERS)}),
]
"""Type of the setting `order`: the name of an order. Settings refuse any other value."""
