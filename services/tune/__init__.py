"""The tuner: finds the settings with which a checkpoint serves best on this machine, and explains
them.

    layouts → calibrate each on real ranks → simulate settings → run the best ones → write

A layout is the part of the settings that only a restart of the workers changes: the number of
stages, of ranks in a stage and of threads in a rank. A layout is calibrated by a short load on a
real local system, whose iterations give a model of costs. The simulator then tries settings of the
scheduler on a workload. The settings with the best predictions are run on a real system, and so are
the default settings.
"""
