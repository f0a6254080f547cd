"""Checks before there is traffic: `kproxy check`, `doctor`, `compat`."""
