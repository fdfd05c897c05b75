"""From a memory budget to a plan of what to save, recompute or offload."""
