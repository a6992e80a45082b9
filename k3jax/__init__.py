"""The Kimi K3 architecture in JAX: a framework for training experiments."""
