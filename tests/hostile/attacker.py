"""`python -m tests.hostile.attacker TARGET`: runs attacks on order.

An order is the name of an attack and the seconds for which it goes on, over and over; it takes
place once at least. The answer counts what came back.
"""

import asyncio
import sys
from collections import Counter

from tests.hostile.attacks import ATTACKS
from tests.hostile.helper import obey
from tests.hostile.target import Target


async def main() -> None:
    """Serves orders until there are no more."""
    target = Target.from_json(sys.argv[1])

    async def serve(order: tuple[str, float]) -> dict[str, int]:
        name, for_s = order
        loop, answers = asyncio.get_running_loop(), Counter[str]()
        end_s = loop.time() + for_s
        while True:
            answers += await ATTACKS[name].run(target)
            if loop.time() >= end_s:
                return dict(answers)

    await obey(serve)


if __name__ == "__main__":
    asyncio.run(main())
