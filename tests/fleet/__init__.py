"""The fleet: several nodes on one machine, over a real nats-server."""
