"""End a worker of pytest-xdist without Python's finalization; conftest.py imports this first.

Triton's compiler never frees some of its objects, and prints a page about them when Python unloads
it, in front of the result of the tests. The functions that `atexit` has are called before.
"""

import atexit
import os

if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)  # the last one to be called, because it is the first one here
