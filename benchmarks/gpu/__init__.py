"""The cost of the GPU path beside what the device could do: kernels, iterations, a whole workload.

    python -m benchmarks.gpu --out DIR                       one GPU, less than eight minutes
    python -m benchmarks.gpu --out DIR --tiny --device cpu   whether it runs; the numbers say little

Needs torch, triton, numpy and safetensors. Draws figures where matplotlib is installed, and runs
the same model in `transformers` where that is.

`sections` are measured one after the other: `limits` (what the device could do, which all else is
held against), `attention`, `operations`, `engine`, `serving`, `transformers`. Each makes rows;
`report` writes them and says how far from the floor they are.
"""
