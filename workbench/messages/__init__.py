"""The messages between controller and hosts: calls, replies, shards, metrics, operations, transfer protocols."""
