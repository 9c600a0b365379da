"""From logits to tokens and logprobs: a reference in torch, and two samplers that agree with it."""
