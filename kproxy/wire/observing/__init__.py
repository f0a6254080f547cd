"""Frames kept for later decoding, and observers of passing bytes, for owners that need more than events."""
