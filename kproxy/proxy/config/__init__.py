"""The settings of `kproxy run`: their models, their sources, and their faults."""
