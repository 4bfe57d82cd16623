"""One suite for two engines: the simulator is held to what the real SGLang does."""
