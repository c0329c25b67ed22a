"""The tuner: finds the settings with which a checkpoint serves best on this machine, and says why.

    layouts → calibrate each on real ranks → simulate all settings → run the best ones → write

A layout is what only a restart of the workers changes: stages, ranks of each, threads. It is
calibrated by a short load on a real local system, whose iterations give a model of costs. The
simulator then tries the settings of the scheduler on a workload, and what promises most is checked
by running it beside the defaults.
"""
