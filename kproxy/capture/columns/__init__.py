"""Captures read many at a time: records and segments by column, exchanges and bodies by the compiled core.

`mapped.py` has the records, `inorder.py` finds the segments that are in order, `later.py` collects the bytes of a
window by connection, `pairs.py` passes them to the core and the rest to the sessions, `programs.py` selects the fields
of bodies that the core reads.
"""
