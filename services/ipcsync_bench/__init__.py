"""The benchmarks of `ipcsync bench`: ipcsync beside the limit, on the same work."""
