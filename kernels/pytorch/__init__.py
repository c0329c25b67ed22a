"""The operations in PyTorch, which serve every device."""
