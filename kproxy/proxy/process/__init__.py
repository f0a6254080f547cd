"""kproxy as a process: its clusters, server, workers, signals, reload and upgrade."""
