"""Whole frames that are kept for later decoding, and the bytes that pass: for owners that need more than events."""
