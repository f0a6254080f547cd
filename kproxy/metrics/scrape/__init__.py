"""Cells to metric families at scrape time, and these to bytes or to OTLP."""
