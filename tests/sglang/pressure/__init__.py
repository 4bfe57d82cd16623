"""A main agent beside growing background load, at the real engine."""
