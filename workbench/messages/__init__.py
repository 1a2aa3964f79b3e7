"""What goes over the wire: calls, replies, shards, metrics, operations, transfer protocols."""
