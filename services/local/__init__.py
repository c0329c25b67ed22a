"""Everything on this machine: the stages, the scheduler and a frontend, as child processes on
loopback."""
