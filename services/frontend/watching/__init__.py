"""The events of the scheduler for viewers: one subscription, however many viewers there are."""
