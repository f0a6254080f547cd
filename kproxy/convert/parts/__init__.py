"""Reads one capture in parts, by several processes or tasks, and joins the results to the rows of a single reader.

            border 1             border 2
    |---------|--------------------|-----------|
     part 0      part 1                part 2        each read once, by a reader of its own
           |wwww|             |wwww|                 warm-up: packets before a border, read by both neighbours

- part: the packets between two borders of a capture.
- reader: reads one part, without data from other readers (`reader.py`).
- warm-up: the packets before a border, from which a reader derives the state of open connections.
- claim: a connection with complete state at a reader's border, which the reader takes over there.
- excerpt: the result of one reader for a connection.
- handover: the point where a connection passes from one reader to the next, and the counts up to it (`handover.py`).
- deferred: packets of connections that no reader could claim, read by connection afterwards (`deferred.py`).
- joining: makes one connection of its excerpts and its deferred packets (`joining.py`).
- correction: values that rows of one part lack: final connection id, exchange numbers, lags.
- conflicting: a connection whose readers disagree; one reader reads all of it. Unsplittable: a capture that one reader
  must read.

`processes.py` runs readers on one machine, `kproxy.spark.tasks.places` as tasks of Spark. `places.py` records the
offsets of packets, `clocks.py` counts packets whose time goes back.
"""
