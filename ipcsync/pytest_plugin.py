"""Fixtures for the xdist suites of those who use ipcsync."""
