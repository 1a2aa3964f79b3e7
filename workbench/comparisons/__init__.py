"""Runs side by side, as their folders tell of them: a frame of all, curves, what differs between two, sweeps."""
