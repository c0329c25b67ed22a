"""Matrices of small numbers with scales, in the layouts in which checkpoints store them.

Of a matrix [n_out, n_in] each layout has several tensors, beside each other under the module's
name. Whole numbers of 4 or 8 bits lie in words of 32, the first in the lowest bits. A number less
its zero point, times its scale, is the weight. That is computed in float32, for one piece of the
matrix at a time, so that nothing but the part that a rank keeps is ever in memory. MXFP4, of
experts, is different in all of this but the last: see `mxfp4.py`.
"""
