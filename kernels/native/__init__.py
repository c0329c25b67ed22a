"""The operations on a CPU, in C++: built by `kernels.build`, loaded by `kernels.native.library`.

The sources are in `src`, a file for each operation or for two related operations. For tensors that
the library does not support, such as other element types, PyTorch's operations are called.
"""
