"""The observer: an ordinary client that shows what a coordinator holds, as metrics, as JSON, and as a page."""
