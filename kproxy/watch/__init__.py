"""`kproxy watch`, the passive mode: packets of interfaces, read as those of captures, to the metrics of a proxy."""
