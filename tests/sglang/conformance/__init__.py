"""The conformance suite: one set of cases for the simulator and for the real SGLang.

The simulator must do what the real engine does.
"""
