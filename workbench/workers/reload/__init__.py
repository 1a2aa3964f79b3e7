"""Edited source code in a living process: found, compared, run again, put back."""
