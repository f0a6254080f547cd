"""One capture read in parts, by several processes or tasks, and joined to the rows that one reader would give.

            border 1             border 2
    |---------|--------------------|-----------|
     part 0      part 1                part 2        each read once, by a reader of its own
           |wwww|             |wwww|                 warm-up: packets before a border, read by both neighbours

- part: what lies between two borders of a capture.
- reader: reads one part and hears nothing of the others (`reader.py`).
- warm-up: the packets before a border from which a reader finds the state of the connections that are under way.
- claim: a connection whose whole state a reader knows at its border, and so takes over there.
- excerpt: what one reader has read of a connection.
- handover: where a connection passed from one reader to the next, and the counts up to there (`handover.py`).
- deferred: packets of connections that no reader could claim, read by connection afterwards (`deferred.py`).
- joining: the excerpts and the deferred packets of a connection become one connection (`joining.py`).
- correction: what rows of one part lack: final connection id, exchange numbers, lags.
- conflicting: a connection whose readers do not agree; one reader reads all of it. Unsplittable: a capture that is so.

`processes.py` runs readers on one machine, `kproxy.spark.places` as tasks of Spark. `places.py` notes where packets
lie, `clocks.py` which are stamped earlier than one before them.
"""
