"""Operator-wise numeric formats."""
