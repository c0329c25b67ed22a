"""The interfaces of matrices that tokens are multiplied with, and the quantisation of matrices."""
