"""What owners see of a session beside its events: whole frames that are kept, and the bytes that pass."""
