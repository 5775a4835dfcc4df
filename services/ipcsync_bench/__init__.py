"""The benchmarks: ipcsync beside its alternatives, and beside the limit, on the same work."""
