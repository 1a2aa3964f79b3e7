"""Carries out one call of a stage: check, plan, send, collect, record."""
