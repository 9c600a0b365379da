"""The engine without the model: the scheduler, KV blocks, the prefix cache and the core loop.

Nothing here imports torch.
"""
