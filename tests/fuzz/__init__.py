"""Inputs that tools make up, sent to the real servers by the hundred thousand: `make fuzz`."""
