"""Real systems whose ranks sleep for the time of an iteration on a given machine."""
