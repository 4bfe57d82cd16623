"""The conformance suite: one set of tests for the simulator and for the real SGLang.

The simulator must do what the real engine does.
"""
