"""The interfaces of matrices that multiply tokens, and the quantisation of such matrices."""
