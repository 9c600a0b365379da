"""Engine processes and their fleet.

link.py is the front end's interface, engine_main.py the engine process. A process imports torch
only after it has connected, so that it is visible early.
"""
