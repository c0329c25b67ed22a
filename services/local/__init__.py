"""The local launcher: runs stages, the scheduler and a frontend on this machine, as child processes
on loopback."""
