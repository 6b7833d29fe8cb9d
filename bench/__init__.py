"""Measurements: each module is a program that says what it measures, and prints figures."""
