"""Compare runs by their folders: a frame of all runs, curves, differences between two runs, sweeps."""
