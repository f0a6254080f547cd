"""Captures read by column: many records, segments, exchanges and bodies in one step each, without Python objects."""
