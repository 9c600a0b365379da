"""`deep_ep.utils`."""
