"""What viewers are told of the scheduler: one subscription to its events, however many look on."""
