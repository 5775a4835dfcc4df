"""The observer: a process without a session that shows what a coordinator holds, as metrics, as JSON, and as a page."""
