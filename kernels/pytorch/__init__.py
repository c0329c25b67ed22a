"""The operations in PyTorch, which run on every device."""
