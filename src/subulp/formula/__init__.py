"""What decides a bit, written once: the named functions of formulas, noise, and how rules are composed."""
