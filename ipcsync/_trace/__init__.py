"""Traces: what a process did with shared events, in a bounded file of its own, and all files merged into one."""
