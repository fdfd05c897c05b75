"""Loops whose reverse-mode memory is chosen by the user."""
