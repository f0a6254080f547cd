"""The daemon that starts the Python workers of a local session: pyspark's daemon, imported from this Python's packages.

Spark puts its own zip of pyspark first in sys.path. A zip has no bytecode, so each worker would compile its imports:
0.8 s of CPU time instead of 0.2 s with the installed package. Both have the same version, since the zip is part of the
package.
"""

import sys

sys.path.sort(key=lambda place: place.endswith(".zip"))  # sort is stable: other entries keep their order

from pyspark.daemon import manager

if __name__ == "__main__":
    manager()
