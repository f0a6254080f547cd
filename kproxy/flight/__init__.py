"""The flight recorder: the last minutes of all connections in memory, and dumps of them to disk."""
