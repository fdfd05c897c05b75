"""From a training step to a priced graph: operations, what is fused, what each costs, and where."""
