"""The time of the GPU path compared with the limits of the device: kernels, iterations, a workload.

    python -m benchmarks.gpu --out DIR                       one GPU, less than eight minutes
    python -m benchmarks.gpu --out DIR --tiny --device cpu   a test run; its numbers mean little

Needs torch, triton, numpy and safetensors. Draws figures if matplotlib is installed, and runs the
same model in `transformers` if that package is installed.

The sections are measured one after the other: `limits` (what the device could do, with which all
other sections are compared), `attention`, `operations`, `engine`, `serving`, `transformers`. Each
section produces rows, one for each measurement. `report` writes the rows, and compares each row's
time with its floor, the least time that the device allows.
"""
