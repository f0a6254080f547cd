"""The tasks of an ingest, and their input and output."""
