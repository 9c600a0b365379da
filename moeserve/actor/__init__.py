"""Messages between tasks and processes: inboxes, actors, wires between them, and the supervision of
child processes.

Read actor.py, zmq_wire.py, handshake.py; then guard.py, process.py, supervisor.py, forking.py.
"""
