"""Calls of functions that may hang, crash or eat memory: in a process of their own, which can be killed.

`limits` is what a user writes at a function, `needs` what a shipped function says of itself, `sessions` what a host
calls, `process` its side of the wire, `server` the side of the process; `in_host` calls functions without one.
"""
