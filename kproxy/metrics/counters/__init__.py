"""Counters by subject, as plain integer cells that their owners increment."""
