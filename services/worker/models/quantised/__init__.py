"""Matrices of quantised numbers with scales, in the layouts in which checkpoints store them.

Most layouts store a matrix [n_out, n_in] as several tensors, whose names begin with the name of the
module. Numbers of less than 8 bits are packed into bytes or 32-bit words. A weight is the number
minus its zero point, times its scale. In some layouts, such as NF4, the number is an index into a
table of values instead. Weights are computed for one piece of the matrix at a time, so that only
the part that a rank keeps is ever in memory. `mxfp4.py` reads the experts of gpt-oss, and the
modules `gguf_…` read GGUF files, in which a matrix is one tensor of blocks.
"""
