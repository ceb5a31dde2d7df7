"""The backends, and the choice among them."""
