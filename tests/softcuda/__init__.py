"""A stand-in for NVIDIA's libcuda.so.1, and the tests that show that it behaves as its README says."""
