"""What must be survived: one test a fault, with real processes and real signals."""
