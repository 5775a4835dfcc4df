"""Replays of graphs that wait for points and record on events."""
