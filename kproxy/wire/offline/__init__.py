"""Sessions over captures that may lack bytes; exchanges of many connections as columns."""
