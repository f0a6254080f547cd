"""Cells of several processes: sent from workers to their parent, and merged there."""
