"""What users take into their own tests: the pytest plugin, and ipcsync.testing."""
