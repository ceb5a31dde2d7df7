"""The algorithms, one file each: the equations, the formula, the class."""
