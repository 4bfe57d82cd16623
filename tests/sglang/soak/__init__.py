"""The soak: random session operations through Berth, and straight at the engine, for comparison."""
