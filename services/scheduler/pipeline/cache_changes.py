"""Puts the changes of the prefix cache into the plan of an iteration."""

from orcinus.v1 import worker_pb2

from services.scheduler.core.memory.entry_changes import NO_CHANGES, Changes


def tell_changes(changes: Changes, plan: worker_pb2.RunIterationsRequest) -> None:
    """Adds the changes of the prefix cache to a plan, if there are any."""
    if changes is not NO_CHANGES:
        plan.cache_changes.secret = changes.secret
        plan.cache_changes.entered_block_id.extend(changes.entered)
        plan.cache_changes.entered_key.extend(changes.entered.values())
        plan.cache_changes.left_block_id.extend(changes.left)
