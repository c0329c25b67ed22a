"""The interfaces of matrices by which tokens are multiplied, and the quantisation of matrices."""
