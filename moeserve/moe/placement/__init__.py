"""Which rank holds which experts: the map, how it follows the load, and when that is worth moving weights. No torch."""
