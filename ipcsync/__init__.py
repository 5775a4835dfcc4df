"""Shared CUDA events for processes that share GPUs."""
