"""Operators on sparse structures and the one interceptor every operator call passes through."""
