"""The evaluation of the Orca paper in virtual time, by the scheduler that serves.

    python -m benchmarks.paper

The costs of its machines are fitted on Figure 9 alone, which measures engines without a scheduler,
and are then held fixed. What Figures 10 and 11 show is predicted from them: the very `Scheduler`,
policies and K/V manager of `services.scheduler.core` run the paper's traces through
`simulator.engine`, beside baselines as they were. Drawn beside what the paper reports.

    published.py            the points of the paper's figures, as far as they can be read
    models.py               Table 1
    gpu_costs.py, fit.py    the time of an iteration, and its parameters
    faster_transformer.py   the paper's baseline
    cellular.py             BatchMaker's policy
    systems.py, sweep.py    what runs, and at which rates
    beyond/                 what the figures leave out
"""
