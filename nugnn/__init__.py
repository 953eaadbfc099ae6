"""Exact full-graph GNN training over unequal devices, built on DGL."""
