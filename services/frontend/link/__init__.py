"""The link to the scheduler: one stream to the scheduler that leads. The scheduler's messages
become events of single requests."""
