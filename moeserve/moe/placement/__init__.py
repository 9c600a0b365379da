"""The placement of experts on ranks, and its rebalancing by measured load. Without torch."""
