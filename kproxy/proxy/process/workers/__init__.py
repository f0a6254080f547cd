"""Several processes that relay as one: `--workers`."""
