"""Coordinators as programs: how they start, and what they say of themselves."""
