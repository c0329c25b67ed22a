"""The baselines of iteration-level scheduling, on the same kernels, ranks and services.

    python -m benchmarks.paper.baselines --model DIR --baseline request_level

Schedulers and batches as they were before Orca (section 3 of the paper), in the place of ours. They
exist to be measured and are no part of the product.
"""
