"""Calls of functions that may hang, crash or eat memory: in a process of their own, which can be killed.

`limits` is what a user writes at a function, `needs` what a shipped function says of itself. `sessions` is what a host
calls, and gives a `session` in which calls are made: in a process, whose side is `server`, or in the host itself.
"""
