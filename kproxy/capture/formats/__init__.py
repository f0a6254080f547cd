"""Capture files of every format: packet records in the order of the file, and byte ranges of a file."""
