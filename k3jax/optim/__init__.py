"""Who moves each weight, and how far: Per-Head Muon, AdamW, the learning rate and QK-Clip."""
