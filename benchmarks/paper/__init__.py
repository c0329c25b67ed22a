"""The evaluation of the Orca paper in virtual time, by the scheduler that serves.

    python -m benchmarks.paper

The costs of the paper's machines are fitted to Figure 9 alone, which measures engines without a
scheduler, and are then held fixed. Figures 10 and 11 are predicted from these costs: the
`Scheduler`, policies and K/V manager of `services.scheduler.core` run the paper's traces through
`simulator.engine`, beside the paper's baselines. The plots show the predictions beside the paper's
points.

    published.py            the points of the paper's figures, as far as they can be read
    models.py               Table 1
    gpu_costs.py, fit.py    the time of an iteration, and its parameters
    faster_transformer.py   the paper's baseline
    cellular.py             BatchMaker's policy
    systems.py, sweep.py    what runs, and at which rates
    beyond/                 what the figures leave out
"""
