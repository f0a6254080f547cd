"""`kproxy top`: the activity of a running kproxy in a terminal; its figures come from the admin API, as in /metrics.

`source` requests answers, `figures` makes rows of them, `tables` formats rows, `screen` draws and handles keys.
"""
