"""Attention, norms, rotary embedding, linear maps, MLP: what model families are made of."""
