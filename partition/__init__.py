"""Splitting a graph into unequal parts, and what each part needs to know of the others."""
