"""Sessions over captures, in which bytes may be missing; exchanges of many connections as columns."""
