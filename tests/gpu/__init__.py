"""Tests that only a real GPU can answer, and the table of what its driver said where CUDA promises nothing."""
