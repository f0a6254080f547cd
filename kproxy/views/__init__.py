"""Everything that people look at: terminal screens, progress, tables of answers, decoded frames.

Views receive figures and return text. They do not fetch the figures.
"""
