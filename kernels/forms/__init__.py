"""What the layers of a model compute beside the plain formula, and the columns of a batch."""
