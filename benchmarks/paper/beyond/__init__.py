"""Comparisons that the paper's figures do not have, in virtual time: the effect of each of Orca's
ideas alone, improved baselines, the defaults of this project, other traces, and an upper bound.

    python -m benchmarks.paper.beyond

All systems run in `simulator.engine`, on machines with the costs that `benchmarks.paper.fit` found.
Of its two fits, the one that agrees better with the paper's points is used.

    setups.py     the systems: request-level or iteration-level
    loads.py      the requests and their arrival times
    trials.py     a setup under a load: its highest throughput, and the throughput within a latency
    ladder.py     from FasterTransformer to Orca, one idea after the other, and each idea alone
    defaults.py   chunks, optimistic admission, prefixes, fairness
    limits.py     an upper bound for every schedule, and an order that knows all lengths
    elsewhere.py  the systems on other traces; 13B
    drawing.py    the plots
"""
