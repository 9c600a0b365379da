"""Sampling: a reference sampler in torch, and native and Triton samplers that agree with it."""
