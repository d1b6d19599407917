"""Models: loading, packed attention, token log-probabilities, values and rewards."""
