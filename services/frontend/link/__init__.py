"""The link to the scheduler: one stream from leader to leader, and its messages as events."""
