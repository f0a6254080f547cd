"""The flight recorder: the last minutes of all connections in memory, and what is written of them when it matters."""
