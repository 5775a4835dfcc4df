"""The observer as a service, its page, and its description."""
