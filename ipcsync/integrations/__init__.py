"""Plugins for other projects, loaded by their plugin interfaces: `lmcache`, `ray`, `vllm`."""
