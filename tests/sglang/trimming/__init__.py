"""The shim's trimming core against a model of the engine, for random conversations. No SGLang."""
