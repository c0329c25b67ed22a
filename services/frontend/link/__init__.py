"""The link to the scheduler: one stream to the scheduler that leads, whose messages become events
of requests."""
