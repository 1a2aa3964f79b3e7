"""Runs hosts: in Ray actors, or inside the kernel."""
