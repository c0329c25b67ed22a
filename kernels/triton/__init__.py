"""The operations as Triton kernels, for CUDA devices.

One operation per file: how it computes, its kernel, and the launcher with the signature of the
operation. Kernels are made when their file is imported, which `kernels.triton.operations` does when
it is asked, so that a process without a GPU loads no Triton. They run on the current CUDA device.
"""
