"""The baselines of iteration-level scheduling, on the same kernels, ranks and services.

    python -m benchmarks.paper.baselines --model DIR --baseline request_level

The baselines replace our scheduler or our batches by those used before Orca (section 3 of the
paper). They exist only for measurements and are not part of the product.
"""
