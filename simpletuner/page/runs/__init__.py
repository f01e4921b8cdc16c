"""Start, stop and watch runs: all is read from output folders, so it does not matter who started one."""
