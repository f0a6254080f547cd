"""Captures to tables on one machine, and what Spark shares of that: the rows of a capture's flows."""
