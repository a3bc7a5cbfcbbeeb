"""Capacity planning: what fits on which GPUs, and what bounds its speed, from a config.json alone."""
