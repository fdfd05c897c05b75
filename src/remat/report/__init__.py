"""Explanations as data, and their renderings."""
