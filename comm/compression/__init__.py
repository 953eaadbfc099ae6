"""Gradients that travel in few bits, with replicas that stay the same bits."""
