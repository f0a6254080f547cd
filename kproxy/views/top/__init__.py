"""`kproxy top`: what any running kproxy does, in a terminal; the figures are those of its admin API, so of /metrics.

`source` asks, `figures` makes rows of the answers, `tables` says how rows look, `screen` draws and takes keys.
"""
