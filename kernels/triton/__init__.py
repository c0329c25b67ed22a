"""The operations as Triton kernels, for CUDA devices.

Most files contain one operation: a description of the computation, the kernel, and a launcher with
the signature of the operation. `kernels.triton.operations` imports these files only when
`triton_ops` is called, so that a process without a GPU does not load Triton. Kernels run on the
current CUDA device.
"""
