"""The front end between text and engine, and its Python interfaces `AsyncEngine` and `LLM`."""
