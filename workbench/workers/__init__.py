"""The workers that carry out a workbench's operations: hosts, roles, and what they share.

A new role: one file in `roles/` and its line in `ROLE_WORKERS`. A new operation: a method with `@register(protocol)`.
"""
