"""The CUDA objects of this process: the fork guard, devices, streams, events."""
