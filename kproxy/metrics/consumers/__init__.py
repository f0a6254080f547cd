"""Consumer lag: the ends of logs, committed offsets, and the difference of both."""
