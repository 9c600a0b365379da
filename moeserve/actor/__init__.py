"""How anything talks to anything: inbox, actor, lifetime, supervision, wires."""
