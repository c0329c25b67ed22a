"""The operations on a CPU, in C++: built by `kernels.build`, loaded by `kernels.native.library`.

The sources are in `src`, a file for each operation or pair of them. Tensors that they do not take,
such as tensors of other element types, go to PyTorch's versions.
"""
