"""The service across real processes."""
