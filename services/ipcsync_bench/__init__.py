"""The benchmarks: ipcsync beside what people would use instead, and beside the limit, on the same work."""
