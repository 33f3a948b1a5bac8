"""What stands beside the weights of a result: manifest, card, provenance, signature."""
