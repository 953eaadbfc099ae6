"""Graphs in: one in-memory type, its sources and its transforms."""
