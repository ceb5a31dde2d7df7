"""Noise, rounding and storage formats: everything that decides a bit."""
