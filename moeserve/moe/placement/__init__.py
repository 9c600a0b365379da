"""The map of experts to ranks, how it follows the load, and when that is worth moving weights. No
torch.
"""
