"""Calls of functions that may hang, crash or eat memory: in a process of their own, which can be killed.

`limits` has the user's decorator, `needs` the decorators of shipped functions. A host calls `sessions`, which gives a
`session` that makes the calls: in a process, whose code is in `server`, or in the host itself.
"""
