"""JAX engine: flax model, paged KV, compiled steps. Implements :class:`pddbridge.engine.Engine`."""
