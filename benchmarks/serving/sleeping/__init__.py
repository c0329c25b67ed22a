"""Real systems whose ranks compute nothing and sleep for the time of an iteration on some
machine."""
