"""Tests the shim's trimming with random conversations, against a model of the engine."""
