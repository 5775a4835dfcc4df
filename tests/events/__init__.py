"""Records and waits between processes: shared events, points, and both engines."""
