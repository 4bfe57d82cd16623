"""Suites that others wrote, run against Berth as their users run them."""
