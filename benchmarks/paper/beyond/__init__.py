"""What the paper's figures leave out, in virtual time: the worth of each of its ideas alone, kinder
baselines, what the defaults of this project add, other traces, and where the limit is.

    python -m benchmarks.paper.beyond

All are policies over one engine, `simulator.engine`, on the machines that `benchmarks.paper.fit`
found; of its two fits the one at which the paper's points lie.

    setups.py     what can be run: request by request, or iteration by iteration
    loads.py      what is asked, and when
    trials.py     a setup under a load: its highest throughput, and that within a latency
    ladder.py     from FasterTransformer to Orca, one idea after the other; each alone
    defaults.py   chunks, optimistic admission, prefixes, fairness
    limits.py     a bound that no schedule exceeds, and an order that knows all lengths
    elsewhere.py  the systems on other traces; 13B
    drawing.py    the plots
"""
