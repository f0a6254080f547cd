"""Metrics that clients push to kproxy (KIP-714)."""
