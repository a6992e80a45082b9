"""Configs are Python functions that return `k3jax.config.Config`."""
