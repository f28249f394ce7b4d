"""What many replicas share: which adapters there are, where they come from, who gets a request.

Nothing here knows of Ray or of routes. Deciding is pure, so that the simulation uses the same code.
"""
