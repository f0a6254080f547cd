"""Captures to tables on one machine; Spark shares the part that makes rows of a capture's flows."""
