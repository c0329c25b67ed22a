"""The operations on a CPU, in C++: built by `kernels.build`, loaded by `kernels.native.library`.

The sources are in `src`, a file for each operation or pair of them. What they do not take, such as
other element types, goes to PyTorch's versions.
"""
