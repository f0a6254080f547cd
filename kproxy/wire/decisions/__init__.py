"""Requests that a session's owner decides, edits or adds, and responses of kproxy's own."""
