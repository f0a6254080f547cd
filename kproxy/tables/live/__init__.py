"""Live events to the files of a dataset: `--record`."""
