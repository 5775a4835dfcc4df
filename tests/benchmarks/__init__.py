"""The laboratory: ipcsync beside its alternatives, in more kinds than `ipcsync bench` has."""
