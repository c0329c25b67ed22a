"""The cost of the GPU path beside what the device could do: kernels, iterations, a whole workload.

    python -m benchmarks.gpu --out DIR                       one GPU, less than eight minutes
    python -m benchmarks.gpu --out DIR --tiny --device cpu   whether it runs; the numbers say little

Needs torch, triton, numpy and safetensors. Draws figures if matplotlib is installed, and runs the
same model in `transformers` if that package is installed.

The sections are measured one after the other: `limits` (what the device could do, with which all
other sections are compared), `attention`, `operations`, `engine`, `serving`, `transformers`. Each
section makes rows; `report` writes the rows and says how far from the floor they are.
"""
