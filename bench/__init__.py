"""The cost of kproxy as ratios to other proxies on the same machine in the same run: `python -m bench`.

`cases` defines the traffic, `broker` and `load` are its two ends, `processes` starts the proxies between them,
`measure` alternates between the proxies, `report` compares with the limits. Ratios hold on any machine, seconds only on
the measured one.
"""
