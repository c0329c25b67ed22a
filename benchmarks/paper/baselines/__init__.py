"""The baselines of iteration-level scheduling, on the same kernels, ranks and services.

    python -m benchmarks.paper.baselines --model DIR --baseline request_level

A baseline replaces this project's scheduler, or its way of making batches, by a method that was
used before Orca (section 3 of the paper). Baselines exist only for measurements and are not part of
the product.
"""
