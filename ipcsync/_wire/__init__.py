"""What travels over the sockets: message types, their MessagePack form, endpoints, and the 48 bytes of a point."""
