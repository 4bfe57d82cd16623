"""The soak: random session operations through Berth and, for comparison, directly at the engine."""
