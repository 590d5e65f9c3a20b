"""Mixture-of-experts models: Llama's attention, and experts in place of the feed-forward network.

moe_config.py      sizes and presets
routing.py         which expert computes which token; the load-balancing losses
dispatch.py        moves tokens to their experts' rows and back, with gathers in both directions
experts.py         the layer: route, exchange, multiply, exchange, combine
wide_gradients.py  products whose weights get float32 gradients
model.py           parameters, their shardings, forward pass and loss
"""
