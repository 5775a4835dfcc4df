"""The asynchronous twin: the same client, events and points with `await`."""
