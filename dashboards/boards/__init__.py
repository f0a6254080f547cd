"""Grafana's boards as plain Python dictionaries: `python -m dashboards.boards` writes them as JSON beside this folder.

A board is one module here; `model` has what they share. `__main__` names them all. A test holds the files equal to what
is made here, and a real Prometheus answers each of their queries (tests/dashboards).
"""
