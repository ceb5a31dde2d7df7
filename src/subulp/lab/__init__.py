"""Experiments and checks behind the ``subulp`` command, one module a command."""
