"""Decides what runs next: requests, plans, scheduler, KV blocks, prefix cache, the core loop. No
torch here.
"""
