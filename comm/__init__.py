"""Communication between ranks: groups, halo exchange, differentiable collectives, gradient sums."""
