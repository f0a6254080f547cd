"""Connections: an admitted client is joined with a broker, watched, aged and drained, on one event loop."""
