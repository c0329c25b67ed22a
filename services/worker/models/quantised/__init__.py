"""Matrices of quantised numbers with scales, in the layouts in which checkpoints store them.

Each layout stores a matrix [n_out, n_in] as several tensors, whose names begin with the name of the
module. Integers of 4 or 8 bits are packed into 32-bit words, the first integer in the lowest bits.
A weight is the number minus its zero point, times its scale. Weights are computed in float32, for
one piece of the matrix at a time, so that only the part that a rank keeps is ever in memory. MXFP4,
a layout of experts, also dequantises one piece at a time, but is different in all other respects:
see `mxfp4.py`.
"""
