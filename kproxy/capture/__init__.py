"""Captures offline: files to packets, packets to streams in order or with gaps, two streams to one Session."""
