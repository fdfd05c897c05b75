"""The transform: `checkpoint`, the primitive it binds, what keeps XLA from undoing it, policies."""
