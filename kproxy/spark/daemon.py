"""What starts Python's workers of a local session: pyspark's own, from the packages of this Python.

Spark puts the zip of pyspark that it ships with before them. A zip has no bytecode, so each worker compiled what it
imported: 0.8 s of CPU time where the package takes 0.2. Both are of one version: the zip is in the package. Refuses to
know what the workers do.
"""

import sys

sys.path.sort(key=lambda place: place.endswith(".zip"))  # stable: what else there is keeps its order

from pyspark.daemon import manager

if __name__ == "__main__":
    manager()
