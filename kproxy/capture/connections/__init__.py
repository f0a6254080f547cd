"""Segments to the connections of a capture: both streams in order, their protocol, and the values of their rows."""
