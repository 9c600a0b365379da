"""Between text and engine: streams of text deltas over any wire, for the server, AsyncEngine and
LLM.
"""
