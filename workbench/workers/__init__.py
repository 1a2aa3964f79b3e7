"""Who runs it: hosts, worker groups, roles, transfer protocols, backends.

A new role: one file in `roles/` and its line in `ROLE_WORKERS`. A new operation: a method with `@register(protocol)`.
"""
