"""Actors with inboxes, connections between processes, and the supervision of child processes.

Start with actor.py, tasks.py, zmq_wire.py and handshake.py. Child processes: guard.py, process.py,
supervisor.py and forking.py.
"""
