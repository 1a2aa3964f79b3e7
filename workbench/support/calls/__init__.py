"""Calls of functions that may hang, crash or eat memory: in a process of their own, which can be killed.

`limits` is what a user writes at a function, `process` the side of the host, `server` the side of the process.
"""
