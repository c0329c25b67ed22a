"""All operations in PyTorch. These run on every device."""
