"""The operations in PyTorch. They run on every device."""
