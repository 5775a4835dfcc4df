"""The bridge: links a coordinator's events with those of other nodes, over NATS. It owns nothing and calls no CUDA."""
