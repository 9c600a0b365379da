"""Starting engines: link.py for the front end's side, engine_main.py for the engine's. No torch
before a wire.
"""
