"""The evaluation of the Orca paper in virtual time, with the scheduler of this project.

    python -m benchmarks.paper

The costs of the paper's machines are fitted only to Figure 9, which measures engines without a
scheduler. Figures 10 and 11 are predicted from these costs: the `Scheduler`, policies and K/V
manager of `services.scheduler.core`, and the paper's baselines, run the paper's traces in
`simulator.engine`. The plots show the predictions together with the paper's points.

    published.py            the points of the paper's figures, as far as they can be read
    models.py               the models of Table 1
    gpu_costs.py, fit.py    the time of an iteration, and its parameters
    faster_transformer.py   the paper's baseline
    systems.py, sweep.py    the systems, and their runs at many rates
    predict.py              predictions for a running system, and measurements of it
    comparison.py           predicted and measured figures, as a table, a record and a plot
    beyond/                 comparisons that the paper's figures do not have
"""
