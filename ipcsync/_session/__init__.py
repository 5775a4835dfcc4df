"""One session with a coordinator, from handshake to goodbye: what stands below a client."""
